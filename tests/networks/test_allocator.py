"""Freed memory that the C library keeps, and what constructing a `Linearisation` leaves as it was."""

import ctypes
import os
import platform
import subprocess
import sys

import pytest

from laplace_sampling.networks.allocator import num_pieces

_NEEDS_GLIBC = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="of glibc 2.33 and later"
)

_BLOCKS = """
import ctypes, sys, warnings, torch
from torch import nn
from laplace_sampling.networks.linearisation import Linearisation

class Blocks(ctypes.Structure):  # of mallinfo2(3); `hblkhd` are the bytes of blocks that the system is asked for
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

count = ctypes.CDLL(None).mallinfo2
count.restype = Blocks

def of_the_system():
    before = count().hblkhd
    held.append(torch.empty(31 * 2**18))
    return count().hblkhd > before

held = []  # freeing a block would change the threshold
model = nn.Linear(1, 1)
with torch.device("meta"):  # a default device of the user
    network = Linearisation(model)
print(of_the_system())
with torch.device("meta"):
    network.jvp(torch.ones(1, 1, device="cpu"), torch.ones(1, 2, device="cpu"))
print(of_the_system())
"""


def lines_of(code: str) -> list[str]:
    """What a fresh process prints, with the allocator's own settings."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    run = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


@pytest.mark.slow
@_NEEDS_GLIBC
def test_freed_blocks_are_kept_after_the_first_product() -> None:
    """Blocks of 31 MiB are the system's own before it, also after a `Linearisation` was constructed."""
    assert lines_of(_BLOCKS) == ["True", "False"]


_STATE = """
import sys, warnings, torch
from torch import nn
from laplace_sampling.networks import allocator, derivative_rules
from laplace_sampling.networks.linearisation import Linearisation

def state():
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._is_fwd_grad_enabled(),
        torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled(),
        torch.get_float32_matmul_precision(), torch.get_default_dtype(), torch.get_num_threads(),
        torch.initial_seed(), torch.get_rng_state().sum().item(), list(warnings.filters), set(sys.modules),
        allocator.keep_freed_memory.cache_info().misses, derivative_rules._load_decompositions.cache_info().misses,
    )

model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
before = state()
network = Linearisation(model)
print(before == state())
network.jvp(torch.ones(4, 2), torch.ones(1, 13))
print(allocator.keep_freed_memory.cache_info().misses)
"""


@pytest.mark.slow
def test_constructing_changes_nothing_in_the_process() -> None:
    assert lines_of(_STATE) == ["True", "1"]


@pytest.mark.parametrize(
    ("num", "sizes", "weights", "pieces"),
    [
        (100, [50.0, 100.0], 1, 1),  # all tensors are kept
        (100, [50.0, 250.0], 1, 4),  # three are enough, four are of one size
        (101, [250.0], 1, 3),  # a prime number has no pieces of one size
        (100, [250.0], 100, 1),  # the weights of three pieces more are more bytes than the tensor
        (2, [250.0], 1, 1),  # a single datum is too large
    ],
)
def test_number_of_pieces(num: int, sizes: list[float], weights: int, pieces: int) -> None:
    assert num_pieces(num, sizes, weights, kept_bytes=100) == pieces
