"""The tangent model as a Gaussian process: exact posteriors in observation space, and kernels for GPyTorch and BoTorch.

- `gram.py`: the Gram matrix, from which `ExactRegression` and `ExactClassification` decompose the whole problem.
- `fit_exact_regression`: hyperparameters of largest evidence, a `TunedRegression`.
- `DualCG`: conjugate gradients on the Gram matrix, for problems whose matrix does not fit in memory.

`tangent_kernel` (`TangentKernel`, `TangentGP`) and `botorch` (`TangentSurrogate`) import GPyTorch, which is slow: they
are to be imported by name, and are not listed here.
"""

from laplace_sampling.gp.dual_cg import DualCG
from laplace_sampling.gp.exact_classification import ExactClassification
from laplace_sampling.gp.exact_regression import ExactRegression
from laplace_sampling.gp.tuned_regression import TunedRegression, fit_exact_regression

__all__ = [
    "DualCG",
    "ExactClassification",
    "ExactRegression",
    "TunedRegression",
    "fit_exact_regression",
]
