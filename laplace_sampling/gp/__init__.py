"""The tangent model as a Gaussian process: exact posteriors in observation space, and kernels for GPyTorch and BoTorch.

- `GramPosterior` (`posterior`): the posterior of all likelihoods, from one decomposition of the Gram matrix;
  `of_largest_evidence` finds its hyperparameters.
- `DualCG` (`dual`): conjugate gradients on the Gram matrix, for problems whose matrix does not fit in memory.
- `TangentKernel`, `TangentGP` (`tangent_kernel`), `TangentSurrogate` (`botorch`): they import GPyTorch, which is slow.
"""
