"""Many settings of models on GPUs at once: from a file to a folder of rows that SQL queries."""
