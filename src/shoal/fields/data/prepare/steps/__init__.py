"""steps: the parts of the table ``preparation``, one file for each."""
