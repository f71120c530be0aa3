"""A part of a page that a script writes, between two marker lines."""

from __future__ import annotations


def replace_block(text: str, begin: str, end: str, block: str) -> str:
    """Return `text` with `block` between the markers; raise `ValueError` if a marker is missing."""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the text lacks {begin} or, after it, {end}")
    return f"{before}{begin}\n{block}\n{end}{after}"
