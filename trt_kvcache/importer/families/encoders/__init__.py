"""Support for encoder-decoder models: the encoder becomes a separate model."""
