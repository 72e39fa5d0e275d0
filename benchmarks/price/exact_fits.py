"""Six images with five outputs each on large networks: an exact fit beside the Jacobian by plain autograd."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from benchmarks.data.tasks import Part
from benchmarks.price.meter import turns
from benchmarks.price.networks import CNN, build, num_weights
from benchmarks.price.setup import Cells, Row, Setup, at_most
from laplace_sampling import LinearisedLaplace

__all__ = ["cells", "jacobian"]

IMAGES, OUTPUTS, SIDE, BOUND = 6, 5, 64, 2.5
NAMES = {
    "ConvNeXt-atto": ("convnext_atto", {}),
    "DeiT-tiny": ("deit_tiny_patch16_224", {"img_size": SIDE}),
    "Res2Net-50": ("res2net50_26w_4s", {}),
}


def cells(setup: Setup) -> Cells:
    if setup.narrow:
        return {"narrow CNN": lambda: rows(setup, "narrow CNN", build(CNN, 0, narrow=True), (1, 28, 28), 10)}
    return {name: partial(of_timm, setup, name) for name in NAMES}


def of_timm(setup: Setup, name: str) -> list[Row]:
    """A network with random weights."""
    if find_spec("timm") is None:
        what = f"{name}: exact fit by the time of the Jacobian"
        return [Row(what, f"≤ {BOUND}", "skipped: timm is not installed (the extra `compatibility` has it)")]
    import timm  # pyright: ignore[reportMissingImports]

    architecture, settings = NAMES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = timm.create_model(architecture, pretrained=False, num_classes=OUTPUTS, **settings)
    return rows(setup, name, network.eval(), (3, SIDE, SIDE), OUTPUTS)


def rows(setup: Setup, name: str, network: nn.Module, shape: tuple[int, ...], outputs: int) -> list[Row]:
    generator = torch.Generator().manual_seed(setup.seed)
    x = torch.randn(IMAGES, *shape, generator=generator)
    part = Part(x, torch.randn(IMAGES, outputs, generator=generator))
    least = turns({"jacobian": lambda: jacobian(network, x), "fit": exact(network, part)}, min(2, setup.repeats))
    ratio, text = least["fit"] / least["jacobian"], ", ".join(f"{key} {value:.2f} s" for key, value in least.items())
    what = f"{name}, {IMAGES} images, {part.y.numel()} outputs: exact fit by the time of the Jacobian"
    return [at_most(what, ratio, BOUND, beside=text, values={"num_weights": num_weights(network), **least})]


def exact(network: nn.Module, part: Part) -> Callable[[], LinearisedLaplace]:
    """A regression with its prior precision and its noise."""

    def fit() -> LinearisedLaplace:
        la = LinearisedLaplace(network, "regression", method="exact")
        return la.fit_hyperparameters(part.loader(IMAGES), progress=False)

    return fit


def jacobian(network: nn.Module, x: Tensor) -> Tensor:
    """One reverse pass for each output of each datum, `[N·C, P]`, in the dtype of the network."""
    weights = [p for p in network.parameters() if p.requires_grad]
    outputs = network(x).flatten()
    found = torch.empty(len(outputs), sum(p.numel() for p in weights), dtype=outputs.dtype)
    for row, output in zip(found, outputs, strict=True):
        grads = torch.autograd.grad(output, weights, retain_graph=True, materialize_grads=True)
        torch.cat([g.flatten() for g in grads], out=row)
    return found
