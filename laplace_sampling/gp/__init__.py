"""The tangent model as a Gaussian process: exact posteriors in observation space, and kernels for GPyTorch and BoTorch.

- `GramPosterior` (`posterior`): the posterior of all likelihoods, from one decomposition of the Gram matrix.
- `of_largest_evidence`: the posterior at the hyperparameters of largest evidence.
- `DualCG` (`dual`): conjugate gradients on the Gram matrix, for problems whose matrix does not fit in memory.

`tangent_kernel` (`TangentKernel`, `TangentGP`) and `botorch` (`TangentSurrogate`) import GPyTorch, which is slow: they
are to be imported by name, and are not listed here.
"""

from laplace_sampling.gp.dual import DualCG
from laplace_sampling.gp.posterior import GramPosterior, of_largest_evidence

__all__ = ["DualCG", "GramPosterior", "of_largest_evidence"]
