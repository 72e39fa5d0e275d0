"""Figures of Ober (2022), quoted and not repeated: log-likelihoods in original units, bounds in standard ones.

Networks have two hidden layers of 50 units, and are means over twenty of the standard splits (tables C.4, C.6 and C.7;
chapter 5 for Wishart processes of five layers).
"""

# By set: the test log-likelihood and the bound for each datum, where it is printed.
PUBLISHED: dict[str, dict[str, tuple[float, float | None]]] = {
    "mean field, Neal prior": {"yacht": (-1.58, -0.46), "energy": (-0.79, 0.21), "concrete": (-3.21, -0.88)},
    "global inducing, Neal prior": {"yacht": (-0.81, 0.74), "energy": (-0.72, 0.95), "concrete": (-3.14, -0.59)},
    "deep GP, global inducing, 5 layers": {"yacht": (-0.48, None), "energy": (-0.70, None), "concrete": (-3.06, None)},
    "deep GP, 5 layers, beside Wishart": {"yacht": (-0.73, 1.46), "energy": (-0.71, 1.38), "concrete": (-3.13, -0.50)},
    "deep Wishart process": {"yacht": (-0.58, 1.59), "energy": (-0.71, 1.40), "concrete": (-3.13, -0.49)},
    "deep Wishart process, AB": {"yacht": (-0.18, 1.79), "energy": (-0.70, 1.41), "concrete": (-3.08, -0.45)},
}
