"""Chooses the tokens of sequences from logits, and decides when sequences end."""
