"""The linear model of a network on its training data, and samples of its posterior.

Files build on each other in this order:

- `draws`: white noise keyed by seed, sample and datum; `datum_rows`: gradients of single data.
- `features`: `Φ` and what is derived from it; `network_features`: that of a network; `cost`: what products take.
- `ggn`: `M = ΦᵀBΦ`; `priors`: Gaussian priors.
- `linear_model`: features, targets and likelihood together, and the mode of the posterior; `sampling`: its samples.
- `tangent_model`: the linear model of a network and a loader, with measurements and unequal noise.
- `dense_curvature`, `kronecker`, `kfac`, `factored`, `low_rank`: posteriors in closed form.

A function that has the name of its file is not listed: import it from the file.
"""

from laplace_sampling.linear_model.draws import Draws as Draws
from laplace_sampling.linear_model.features import Features as Features
from laplace_sampling.linear_model.ggn import GGN as GGN
from laplace_sampling.linear_model.linear_model import LinearModel as LinearModel
from laplace_sampling.linear_model.linear_model import linear_model_mode as linear_model_mode
from laplace_sampling.linear_model.network_features import NetworkFeatures as NetworkFeatures
from laplace_sampling.linear_model.sampling import sample_posterior as sample_posterior
