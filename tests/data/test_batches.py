"""Batches as networks take them, and the outputs that come back."""

from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from laplace_sampling.data import batches
from laplace_sampling.data.batches import Layout

X = torch.arange(12.0).reshape(4, 3)
NESTED = {"a": X, "more": (X[:, 0], [X.long(), "word"]), "scale": torch.tensor(2.0), "flag": True}


def test_arguments_are_positional_or_by_name() -> None:
    assert batches.arguments(X) == ((X,), {})
    assert batches.arguments([X, 3]) == ((X, 3), {})
    assert batches.arguments(UserDict(a=X)) == ((), {"a": X})


@pytest.mark.parametrize("x", [X, (X, X[:, 0]), NESTED, UserDict(NESTED)], ids=["tensor", "tuple", "dict", "mapping"])
def test_rows_of_any_batch_are_taken_and_joined(x) -> None:
    assert batches.num_rows(x) == 4
    pieces = batches.split(x, 3)
    assert [batches.num_rows(piece) for piece in pieces] == [3, 1]
    joined = batches.concatenate(pieces)
    for found, expected in zip(batches.batched(joined)[0], batches.batched(x)[0], strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(batches.batched(batches.take(x, torch.tensor([2, 0])))[0][0], X[[2, 0]])


def test_what_is_no_batch_goes_through() -> None:
    part = batches.take(NESTED, slice(2))
    assert part["flag"] is True
    assert part["more"][1][1] == "word"
    assert part["scale"] is NESTED["scale"]
    assert part["more"][1][0].shape == (2, 3)


def test_batches_without_rows_are_refused() -> None:
    with pytest.raises(TypeError, match=r"\bdict\b"):
        batches.num_rows({"a": 3, "b": torch.tensor(1.0)})
    with pytest.raises(ValueError, match="axis"):
        batches.num_rows((X, torch.zeros(2, 5)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_narrow_numbers_are_widened_and_nothing_else(dtype: torch.dtype) -> None:
    x = {"half": X.half(), "bf": X.bfloat16(), "wide": X.double(), "ids": X.long(), "mask": X > 2}
    placed = batches.place(x, torch.device("cpu"), dtype)
    assert [placed[name].dtype for name in x] == [dtype, dtype, torch.float64, torch.int64, torch.bool]


def test_logits_of_an_output_object_are_taken() -> None:
    for output in ({"loss": torch.tensor(1.0), "logits": X}, SimpleNamespace(logits=X, hidden_states=None), X):
        values, layout = batches.read(output, 4)
        assert values is X
        assert layout == Layout.single((3,))


def test_heads_are_flattened_one_after_the_other() -> None:
    flat, layout = batches.read({"map": X.reshape(4, 3, 1), "one": X[:, 0]}, 4)
    assert torch.equal(flat, torch.cat([X, X[:, :1]], dim=1))
    assert (layout.names, layout.size, layout.sizes) == (["map", "one"], 4, [3, 1])
    heads = layout.split(flat[None])
    assert heads["map"].shape == (1, 4, 3, 1)
    assert torch.equal(heads["one"][0], X[:, 0])
    with pytest.raises(ValueError, match="shape"):
        batches.read({"a": X}, 5)


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (Layout.single((2, 3)), Layout.single((4, 3))),
        (Layout.single((2, 3, 1)), Layout.single((2, 5, 4))),
        (Layout((("a", (2,)), ("b", ()))), Layout((("a", (5,)), ("b", ())))),
    ],
)
def test_widening_is_undone_by_its_transpose(small: Layout, large: Layout) -> None:
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.randn(2, layout.size, generator=generator) for layout in (small, large))
    wide = small.widen(u, large)
    assert wide.shape == (2, large.size)
    assert torch.equal(large.narrow(wide, small), u)
    assert_close((wide * v).sum(), (u * large.narrow(v, small)).sum())
    assert small.union(large) == large == large.union(small)
    first = large.split(wide)[large.heads[0][0]]
    assert torch.equal(first[(..., *map(slice, small.heads[0][1]))], small.split(u)[small.heads[0][0]])


def test_outputs_of_different_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="axes"):
        Layout.single((2, 3)).union(Layout.single((2,)))


def test_arrays_become_tensors() -> None:
    x = np.arange(6.0).reshape(3, 2)
    read_only = x.copy()
    read_only.setflags(write=False)
    found = batches.as_tensors({"a": x, "rest": (x[::-1], read_only), "flag": True})
    assert torch.equal(found["a"], torch.from_numpy(x))
    assert torch.equal(found["rest"][0], torch.from_numpy(x).flip(0))
    assert torch.equal(found["rest"][1], found["a"])
    assert found["flag"] is True
    with pytest.raises(TypeError, match="<U1"):
        batches.as_tensors((np.array(["a"]), x))


def test_flaws_of_batches() -> None:
    assert batches.flaw_of((X, X.long(), "word")) is None
    # Their sum is infinite, and none of them is.
    assert batches.flaw_of(torch.full((4,), 3e38)) is None
    for x, said in ((X / 0, "NaN or infinity"), (X.to("meta"), "device 'meta'"), (X.to_sparse(), "sparse tensors")):
        flaw = batches.flaw_of({"a": X, "b": x})
        assert flaw is not None
        assert said in flaw


@pytest.mark.parametrize("output", [X + 0j, X.long(), X > 0])
def test_outputs_that_are_not_differentiated_are_refused(output) -> None:
    with pytest.raises(TypeError, match=rf"{output.dtype}"):
        batches.read(output, 4)
