"""What a sequence is given once: the output of an encoder, and what is made of it."""
