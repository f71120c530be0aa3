"""Read, check and write model files and the files beside them."""
