"""Tensors of other classes, such as those of MONAI and torchvision, as inputs, targets, weights and in files."""

import io
from typing import Any

import torch
from grids import covering
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from laplace_sampling import LinearisedLaplace


class Named(Tensor):
    """The class stays in everything that is asked of a tensor, as that of a MetaTensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out.as_subclass(cls) if type(out) is Tensor else out


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 5), nn.Linear(5, 3)
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)) * self.scale)


def _problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return Scaled(), torch.randn(20, 3), torch.randint(0, 3, (20,))


def _fitted(model: nn.Module, x: Any, y: Any, method: str, parameters: str | None) -> LinearisedLaplace:
    la = LinearisedLaplace(model, "classification", method=method, parameters=parameters, num_samples=4)
    return la.fit([(x, y)], progress=False)


@covering(
    where=["inputs", "targets", "weights", "buffers"],
    method=["exact", "krylov"],
    parameters=[None, "last_layer"],
)
def test_they_count_as_plain_tensors(method: str, parameters: str | None, where: str) -> None:
    model, x, y = _problem()
    expected = _fitted(model, x, y, method, parameters).predict(x)
    data = x.as_subclass(Named) if where == "inputs" else x
    labels = y.as_subclass(Named) if where == "targets" else y
    if where == "weights":
        model.first.weight = nn.Parameter(model.first.weight.detach().as_subclass(Named))  # pyright: ignore
    if where == "buffers":
        model.scale = torch.ones(5).as_subclass(Named)
    la = _fitted(model, data, labels, method, parameters)
    prediction, file = la.predict(data), io.BytesIO()
    assert type(prediction.outputs) is type(prediction.stddev) is Tensor
    torch.testing.assert_close(prediction.stddev, expected.stddev, rtol=1e-4, atol=0)
    assert all(type(leaf) is Tensor for leaf in tree_leaves(la.state_dict()) if isinstance(leaf, Tensor))
    la.save(file)
    file.seek(0)
    loaded = LinearisedLaplace.load(file, model)
    torch.testing.assert_close(loaded.predict(x).stddev, expected.stddev, rtol=1e-4, atol=0)


def test_weights_that_change_what_is_computed_stay_what_they_are() -> None:
    """As quantised ones, whose class has products of its own."""

    class Doubled(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                if func is nn.functional.linear:
                    return func(args[0], 2 * args[1].as_subclass(Tensor), *args[2:], **(kwargs or {}))
                out = func(*args, **(kwargs or {}))
            return out.as_subclass(cls) if func is Tensor.detach else out

    model, x, y = _problem()
    first = model.first.weight.detach().clone()  # pyright: ignore
    expected = []
    for weight in (first.as_subclass(Doubled), 2 * first):
        model.first.weight = nn.Parameter(weight, requires_grad=False)  # pyright: ignore
        expected.append(_fitted(model, x, y, "exact", "head.weight").predict(x).stddev)
    torch.testing.assert_close(*expected)
