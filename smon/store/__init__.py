"""What SMon keeps: SQL rows, event files, retention. ORM rows never leave this package."""
