"""Trainers, and the interfaces of other libraries, around `LinearisedLaplace`. Each file needs an extra of its own."""
