"""Curvature of which every function is a closed form, for every prior precision."""
