"""The code of the page on graphs."""

import re
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from torch import nn
from torch.testing import assert_close

from laplace_sampling import LinearisedLaplace

PAGE = Path(__file__).parents[2] / "docs" / "graphs.md"


@pytest.fixture(scope="module")
def code() -> list[dict[str, Any]]:
    """What is there after each of the two blocks of code."""
    pytest.importorskip("torch_geometric", reason="PyTorch Geometric is not installed")
    names, after = {"print": lambda *_: None}, []
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
        after.append(dict(names))
    assert len(after) == 2
    return after


def test_nodes_have_the_error_bars_of_dense_algebra(code: list[dict[str, Any]]) -> None:
    names = code[0]
    model, train, test, pred = (names[name] for name in ("model", "train", "test", "pred"))
    assert (pred.probs.argmax(1) == names["labels"][test]).float().mean() > 0.6  # chance is a third
    precise = names["Nodes"](names["x"].double(), names["edge_index"]).double()
    precise.load_state_dict(model.state_dict())
    la = LinearisedLaplace(precise, "regression", method="exact")
    y = nn.functional.one_hot(names["labels"][train], 3).double()
    la.fit([(train, y)], progress=False)
    J, J_test = reference.jacobian(precise, train).flatten(0, 1), reference.jacobian(precise, test)
    noise = float(la.noise_precision_)
    H = noise * J.T @ J + float(la.prior_precision_) * torch.eye(J.shape[1]).double()
    expected = (J_test @ torch.linalg.inv(H) * J_test).sum(-1).sqrt()
    assert_close(la.predict(test).stddev, expected, rtol=1e-6, atol=0)


def test_predictions_are_of_the_graph_of_the_fit(code: list[dict[str, Any]]) -> None:
    names = code[0]
    model, edges, expected = names["model"], names["edge_index"], names["la"].predict(names["test"])
    model.edge_index = edges[:, 1:]
    assert torch.equal(names["la"].predict(names["test"]).probs, expected.probs)
    model.edge_index = edges


def test_graphs_of_a_batch_do_not_act_on_each_other(code: list[dict[str, Any]]) -> None:
    names = code[1]
    x = names["features"], names["adj"], names["mask"]
    stddev = names["la"].predict(x).stddev
    alone = torch.cat([names["la"].predict(tuple(t[n : n + 1] for t in x)).stddev for n in range(5)])
    assert_close(alone, stddev[:5], rtol=1e-3, atol=1e-5)
