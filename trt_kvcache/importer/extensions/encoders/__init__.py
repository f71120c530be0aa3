"""The encoder of a decoder, as a model of its own."""
