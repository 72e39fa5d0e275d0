"""The linear model of a network on its training data, and samples of its posterior.

Files build on each other in this order:

- `draws`: white noise keyed by seed, sample and datum; `datum_rows`: gradients of single data.
- `features`: `Φ` and what is derived from it; `network_features`: that of a network; `cost`: what products take.
- `ggn`: `M = ΦᵀBΦ`; `priors`: Gaussian priors; `bounds`: where searches for precisions end.
- `linear_model`: features, targets and likelihood together, and the mode of the posterior; `sampling`: its samples.
- `tangent_model`: the linear model of a network and a loader, with measurements and unequal noise; `held_out`: that of
  held-out data.
"""
