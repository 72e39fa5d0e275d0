import os
import signal
import warnings

import pytest

# Threads of SciPy's BLAS wait for each other where tests run side by side. It reads this once, when it is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch
from cases import CASES, Case, make_case

# A process that a shell starts in the background ignores Ctrl-C, which some tests send to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Tensors are small, and tests run side by side.
torch.set_num_threads(1)

# The first forward derivative imports what warns of torch.jit: here, and not in a test that counts warnings.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.func.jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
