"""Costs of exported posteriors."""
