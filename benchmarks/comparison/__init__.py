"""What `python -m benchmarks` runs: error bars of this library and of others, on the same tasks and networks."""
