"""All that people look at."""
