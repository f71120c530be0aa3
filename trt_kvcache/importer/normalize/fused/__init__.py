"""Operators that do several things at once, as the standard operators that they are made of."""
