"""The page in a real browser, beside what the command line prints for the same question."""
