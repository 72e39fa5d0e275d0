"""What `python -m benchmarks.comparison` runs: error bars of this library and of others on the same networks."""
