"""Between text and tokens."""
