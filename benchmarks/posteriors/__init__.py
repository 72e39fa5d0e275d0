"""Bayesian neural networks and Gaussian processes on features beside linearised Laplace, on the same networks."""
