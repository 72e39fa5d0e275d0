"""`examples/graphs.py`: nodes of one graph, and a graph for each datum."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from torch import nn
from torch.testing import assert_close

from laplace_sampling import LinearisedLaplace

pytest.importorskip("torch_geometric", reason="PyTorch Geometric is not installed")


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[2] / "examples" / "graphs.py"))


def test_nodes_have_the_error_bars_of_dense_algebra(names: dict[str, Any]) -> None:
    model, train, test, pred = (names[name] for name in ("of_nodes", "train", "test", "pred"))
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


def test_predictions_are_of_the_graph_of_the_fit(names: dict[str, Any]) -> None:
    model, edges, la = names["of_nodes"], names["edge_index"], names["nodes"]
    expected = la.predict(names["test"])
    model.edge_index = edges[:, 1:]
    assert torch.equal(la.predict(names["test"]).probs, expected.probs)
    model.edge_index = edges


def test_graphs_of_a_batch_do_not_act_on_each_other(names: dict[str, Any]) -> None:
    x = names["features"], names["adj"], names["mask"]
    stddev = names["graphs"].predict(x).stddev
    alone = torch.cat([names["graphs"].predict(tuple(t[n : n + 1] for t in x)).stddev for n in range(5)])
    assert_close(alone, stddev[:5], rtol=1e-3, atol=1e-5)
