"""What attends to caches: scores, masks, biases, and how keys and values are read."""
