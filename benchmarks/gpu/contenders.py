"""GGN products of the same `K` vectors by this library, `vmap` and curvlinops, and one gradient of the same batch."""

import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap

from laplace_sampling.networks.linearisation import Linearisation


def contenders(module: nn.Module, x: Tensor, K: int, chunk: int) -> dict[str, Callable[[], Tensor]]:
    """Functions that compute the products, and `gradient`; curvlinops is one of them where it is installed."""
    network = Linearisation(module)
    weights = {name: p.detach() for name, p in module.named_parameters()}
    f = network(x)
    labels = torch.randint(f.shape[1], (len(x),), device=x.device)
    p = f.softmax(-1)
    v = torch.randn(K, network.num_parameters, device=x.device)
    tangents = network.unflatten(v)

    def curvature(u: Tensor) -> Tensor:
        return p * u - p * (p * u).sum(-1, keepdim=True)

    def one(tangent: dict[str, Tensor]) -> Tensor:
        def outputs(w: dict[str, Tensor]) -> Tensor:
            return functional_call(module, w, (x,))

        u = curvature(jvp(outputs, (weights,), (tangent,))[1])
        return torch.cat([g.reshape(-1) for g in vjp(outputs, weights)[1](u)[0].values()])

    def gradient() -> Tensor:
        return torch.autograd.grad(F.cross_entropy(module(x), labels), list(module.parameters()))[0]

    products = {
        "gradient": gradient,
        "ours": lambda: network.ggn(x, v, curvature),
        "vmap": torch.no_grad()(lambda: vmap(one, chunk_size=chunk)(tangents)),
    }
    try:
        from curvlinops import GGNLinearOperator  # pyright: ignore[reportMissingImports]
    except ImportError:
        return products
    loss = nn.CrossEntropyLoss(reduction="sum")
    operator = GGNLinearOperator(
        module,
        loss,
        list(module.parameters()),
        [(x, labels)],
        check_deterministic=False,  # pyright: ignore
    )
    columns = v.T.contiguous() if K > 1 else v[0]
    return {**products, "curvlinops": lambda: (operator @ columns).reshape(-1, K).T}  # pyright: ignore


def least_seconds(products: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    """The least seconds of each, as they run in turns: of the processor, or until a GPU is done."""

    def now() -> float:
        if device.type == "cpu":
            return time.process_time()
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    times: dict[str, list[float]] = {name: [] for name in products}
    for _ in range(repeats + 1):
        for name, call in products.items():
            started = now()
            call()
            times[name].append(now() - started)
    return {name: min(of_one[1:]) for name, of_one in times.items()}


def check(result: Tensor, expected: Tensor, way: str) -> None:
    """Raises an error if two products differ by more than rounding in float32 explains, also through flipped ReLUs."""
    off = float((result - expected).norm() / expected.norm())
    if not off < 2e-3:
        raise ValueError(f"{way} differs by {off:.2g} of its size")
