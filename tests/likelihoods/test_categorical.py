import pytest
import torch
from torch.testing import assert_close

from laplace_sampling.likelihoods.categorical import Categorical


def test_labels_of_another_axis_say_which() -> None:
    y = torch.zeros(8, 5, dtype=torch.long)
    with pytest.raises(ValueError, match="class_dim=2"):
        Categorical().check_targets(torch.Size((8, 5, 3)), y)
    with pytest.raises(ValueError, match=r"^(?!.*class_dim).*\[8, 7\]"):
        Categorical().check_targets(torch.Size((8, 5, 3)), torch.zeros(8, 7, dtype=torch.long))


def test_labels_of_any_integer_type() -> None:
    f, y = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, 1])
    assert_close(Categorical().loss(f, y.int()), Categorical().loss(f, y))
    assert_close(Categorical().gradient(f, y.to(torch.uint8)), Categorical().gradient(f, y))


def test_settings_of_another_kind_are_refused() -> None:
    for name in ("class_dim", "ignore_index"):
        with pytest.raises(ValueError, match=name):
            Categorical(**{name: 1.5})
