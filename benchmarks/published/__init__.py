"""Published tables beside ours, and joint predictions at work: see `python -m benchmarks.published --help`.

Each part is one file with its published figures, its cells, and its section of `docs/published.md`.
"""
