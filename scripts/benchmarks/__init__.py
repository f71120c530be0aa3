"""The benchmarks of scripts/bench.py, one per module, and what they share."""
