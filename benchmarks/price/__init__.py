"""The price list: what error bars cost beside one epoch of training, and what they are worth, with the bounds held.

`python -m benchmarks.price` runs it. Each part is a file with a function `cells`: from a `Setup` to rows by name.
"""
