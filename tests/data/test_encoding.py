import torch
from torch.testing import assert_close

from laplace_sampling.data.encoding import decode_inputs, encode_inputs


def test_inputs_of_any_structure_come_back() -> None:
    a, b = torch.randn(3, 2), torch.arange(3)
    x = {"pair": (a, [b, a]), "flag": True, "scale": 0.5, "nothing": None, "name": "x"}
    entries = encode_inputs(x, "train.x")
    assert all(isinstance(entry, torch.Tensor) for entry in entries.values())
    assert all(name.startswith("train.x") for name in entries)
    back = decode_inputs(entries, "train.x")
    assert {name: value for name, value in back.items() if name != "pair"} == {
        "flag": True, "scale": 0.5, "nothing": None, "name": "x"
    }  # fmt: skip
    assert_close(back["pair"], [a, [b, a]])
    assert decode_inputs(encode_inputs(a)) is a
