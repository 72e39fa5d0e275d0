"""Gaussian processes with any kernel of GPyTorch, on data that no factor fits: `condition`, `tune`.

- `condition`, `KernelPosterior` (`conditioned`): mean, variance and samples of a fitted model.
- `tune` (`tuning`): hyperparameters by the evidence.
- `inducing_weights` (`inducing`): the posterior of some points that stand for all data.
- `KernelPaths` (`paths`): samples as functions, as BoTorch takes them.
- `ConditionedModel` (`botorch`, by itself, as it imports BoTorch): the posterior as a model of BoTorch.
- `Prior` (`prior`): a fitted model as both take it.
- `PriorDraws` (`prior_draws`): functions from the prior of a kernel.
- `KernelRows` (`kernel_rows`): its matrix, as the solvers of `laplace_sampling.solvers.row_blocks` see it.
- `TanimotoKernel` (`tanimoto`): of fingerprints.

The room imports GPyTorch, which is slow.
"""

from laplace_sampling.kernels.conditioned import KernelPosterior, condition
from laplace_sampling.kernels.tanimoto import TanimotoKernel
from laplace_sampling.kernels.tuning import Tuned, tune

__all__ = ["KernelPosterior", "TanimotoKernel", "Tuned", "condition", "tune"]
