"""Posteriors as modules that need neither training data nor this library's fits."""
