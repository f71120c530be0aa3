"""Constants: inputs that stay the same in all steps of a sequence, such as the outputs of an encoder."""
