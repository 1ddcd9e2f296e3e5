"""What users meet: questions (the parameters of every command), reports, the command line, and the web page."""
