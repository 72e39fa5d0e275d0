"""A standing trial of the whole library: `python -m benchmarks.trial`.

Each file is a part with one function, `run(count, seed) -> Report`: so many trials, and the defects that they found.
"""
