"""Benchmarks: ratios to hand-written peers, measured in the same run; see README.md."""
