"""The parts of `linear_operator` and GPyTorch that are used in observation space, imported without their warnings."""

import warnings

with warnings.catch_warnings():
    # Both use torch.jit.script at import, deprecated in new versions of torch.
    warnings.filterwarnings("ignore", message=".*torch.jit.*", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
    import gpytorch
    from linear_operator import LinearOperator, settings, to_dense, to_linear_operator
    from linear_operator.operators import DenseLinearOperator, TriangularLinearOperator
    from linear_operator.operators._linear_operator import IndexType
    from linear_operator.utils.linear_cg import linear_cg
    from linear_operator.utils.warnings import NumericalWarning

__all__ = [
    "DenseLinearOperator",
    "IndexType",
    "LinearOperator",
    "NumericalWarning",
    "TriangularLinearOperator",
    "gpytorch",
    "linear_cg",
    "settings",
    "to_dense",
    "to_linear_operator",
]
