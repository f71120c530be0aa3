"""How tokens are chosen, and when a sequence ends."""
