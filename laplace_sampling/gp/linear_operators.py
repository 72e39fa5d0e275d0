"""The parts of `linear_operator` and GPyTorch that are used in observation space, imported without their warnings."""

import warnings

with warnings.catch_warnings():
    # Both use torch.jit.script at import, deprecated in new versions of torch.
    warnings.filterwarnings("ignore", message=".*torch.jit.*", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
    import gpytorch as gpytorch
    from linear_operator import LinearOperator as LinearOperator
    from linear_operator import settings as settings
    from linear_operator import to_linear_operator as to_linear_operator
    from linear_operator.operators._linear_operator import IndexType as IndexType
