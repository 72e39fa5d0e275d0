"""Data sets of the benchmarks: generated, bundled with scikit-learn and matplotlib, or in a folder of UCI data."""
