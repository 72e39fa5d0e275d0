"""Which weights `parameters=` selects."""

import copy

import pytest
import reference
import torch
from cases import make_case
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling.networks.linearisation import Linearisation


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (None, ["0.weight", "0.bias", "2.weight", "2.bias"]),
        ("2.*", ["2.weight", "2.bias"]),
        (["2.bias", "0.weight"], ["0.weight", "2.bias"]),
        (lambda name, p: p.dim() == 2, ["0.weight", "2.weight"]),
    ],
)
def test_parameters_selects_by_name_glob_or_predicate(selection, expected) -> None:
    model = make_case("classification").model
    network = Linearisation(model, selection)
    assert network.names == expected
    chosen = copy.deepcopy(model)
    for name, p in chosen.named_parameters():
        p.requires_grad_(name in expected)
    x = random(3, 3)
    assert_close(network.jacobian(x), reference.jacobian(chosen, x))


def test_patterns_of_names_classes_and_exclusions() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    model[0].weight.requires_grad_(False)

    def names(selection) -> list[str]:
        return Linearisation(model, selection).names

    assert names("!*.bias") == ["1.weight", "2.weight"]  # of those that require a gradient
    assert names(["*", "!*.bias"]) == ["0.weight", "1.weight", "2.weight"]
    assert names("!*Norm*.*") == ["0.bias", "2.weight", "2.bias"]
    assert names(["Linear.*", "!2.*"]) == ["0.weight", "0.bias"]
    assert names(["!1.*", "!*.weight"]) == ["0.bias", "2.bias"]
    assert names(["LayerNorm.weight", "2.bias"]) == ["1.weight", "2.bias"]
    with pytest.raises(ValueError, match="BatchNorm2d"):
        names(["Linear.*", "!BatchNorm2d.*"])
    with pytest.raises(ValueError, match="`parameters`"):
        names(["1.*", "!*"])
    with pytest.raises(ValueError, match="`parameters`"):
        names([])


def test_a_name_is_no_pattern() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.Linear = nn.Linear(2, 3), nn.Linear(3, 1)
            self.table = nn.ParameterDict({"a[0]": nn.Parameter(torch.ones(2)), "a0": nn.Parameter(torch.ones(2))})

    def names(selection) -> list[str]:
        return Linearisation(Named(), selection).names

    assert names("Linear.weight") == ["Linear.weight"]
    assert names("table.a[0]") == ["table.a[0]"]
    assert names(["Linear.*", "!Linear.weight"]) == ["first.weight", "first.bias", "Linear.bias"]
    assert names(["table.*", "!table.a[0]"]) == ["table.a0"]
    assert names(names(None)) == names(None)


def test_tied_weights_have_the_names_of_all_their_modules() -> None:
    model = nn.Module()
    model.table, model.head = nn.Embedding(5, 3), nn.Linear(3, 5)
    model.head.weight = model.table.weight
    for selection in ("head.weight", "table.weight", "Linear.weight", "Embedding.*", ["*", "!*.bias"]):
        assert Linearisation(model, selection).names == ["table.weight"]
    assert Linearisation(model, "head.*").names == ["table.weight", "head.bias"]
    assert Linearisation(model, "!head.weight").names == ["head.bias"]
