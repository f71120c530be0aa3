"""The choice of tokens, and the end of a sequence."""
