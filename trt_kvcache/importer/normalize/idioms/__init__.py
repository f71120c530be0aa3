"""The ways in which exporters write caches and states."""
