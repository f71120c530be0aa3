"""Decodes of one model at its stations, compared: as a checkpoint, as exported, rewritten, parsed, built."""
