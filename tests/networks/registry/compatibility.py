"""Whether a network works: `run` compares its products with differences, fits it and predicts.

- In float64 `φv` is compared with central differences or two reverse passes, and `φᵀu` with the module's own gradient.
- `LinearisedLaplace` fits a few samples on a few data, and predicts.
- The module is the same afterwards: weights, buffers, gradients, modes, hooks and attributes.
"""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from laplace_sampling import IsotropicPrior, LinearisedLaplace
from laplace_sampling.data.batches import arguments, num_rows, place, take
from laplace_sampling.networks.derivatives import forward_mode_kernels
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.shell import Shell

TOLERANCE = 1e-5


@dataclass
class Outcome:
    """What happened to one network."""

    library: str
    name: str
    size: int = 0
    against: str = ""
    error: float = float("nan")
    fitted: bool = False
    unchanged: bool = False
    notices: list[str] = field(default_factory=list)

    @property
    def works(self) -> bool:
        return self.error <= TOLERANCE and self.fitted and self.unchanged

    def row(self) -> str:
        notices = "; ".join(dict.fromkeys(self.notices)).replace("|", "\\|").replace("\n", " ")
        yes = {True: "yes", False: "**no**"}
        cells = [self.library, self.name, f"{self.size:,}", self.against, f"{self.error:.0e}"]
        return f"| {' | '.join(cells)} | {yes[self.fitted]} | {yes[self.unchanged]} | {notices} |"


def state(module: nn.Module) -> dict[str, Any]:
    """The state of a module that a user would notice if it changed."""
    return {
        "weights": [(n, id(p), p.requires_grad, p.detach().clone()) for n, p in module.named_parameters()],
        "buffers": [(n, id(b), b.clone()) for n, b in module.named_buffers()],
        "attributes": [
            {k: id(v) for k, v in m.__dict__.items() if k != "training"} | {"training": m.training}
            for m in module.modules()
        ],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in module.modules()],
        "flat": [[id(w) for w in m._flat_weights] for m in module.modules() if isinstance(m, nn.RNNBase)],
        "grads": [p.grad is None for p in module.parameters()],
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


class Widened(TorchFunctionMode):
    """Skips casts to float32, which many norms make, so that all stays in float64."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        wide = {torch.float32: torch.float64}
        args = tuple(wide.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        kwargs = {k: wide.get(a, a) if isinstance(a, torch.dtype) else a for k, a in (kwargs or {}).items()}
        return func(*args, **kwargs)


def product_error(network: Linearisation, x: Any) -> tuple[float, str]:
    """The largest error, those of the second kind counted 10,000 times, and what `φv` was compared with.

    - Of `φv`, against central differences at the best of four steps; or else against two reverse passes.
    - Of `φᵀu`, against the module's own gradient, to which `φv` has to be adjoint.
    - Of the Jacobian times `v`, against `φv`.
    """
    generator = torch.Generator().manual_seed(1)
    v = torch.randn(2, network.num_parameters, generator=generator, dtype=torch.float64)
    v /= v.norm(dim=1, keepdim=True) / network.weights.norm()
    jv = network.jvp(x, v)
    u = torch.randn(jv.shape, generator=generator, dtype=torch.float64)
    pulled = network.vjp(x, u)

    alone = Shell(copy.deepcopy(network.source).eval(), network.names)

    def f(w: Tensor) -> Tensor:
        return alone(alone.unflatten(w), x).reshape(num_rows(x), -1)

    try:  # the module without any context of ours
        f(network.weights)
        ours = nullcontext
    except RuntimeError:  # for kernels that torch has in float32 only
        ours = forward_mode_kernels

    errors = []
    with torch.no_grad(), ours():
        for h in (1e-4, 1e-5, 1e-6, 1e-7):
            difference = torch.stack([(f(network.weights + h * t) - f(network.weights - h * t)) / (2 * h) for t in v])
            errors.append(relative(difference, jv))
    error, against = min(errors), "differences"
    if error > TOLERANCE:
        error, against = _two_pullbacks_error(network, x, v, jv), "reverse passes"
    w = network.weights.requires_grad_()
    with ours():
        gradients = torch.stack([torch.autograd.grad(f(w), w, u_k)[0] for u_k in u])
    forward, reverse = (jv * u).sum((1, 2)), (v * gradients).sum(1)
    adjoint = float((forward - reverse).abs().max() / (jv.norm() * u.norm()))
    # each datum alone, since the range of a quantisation depends on the batch
    each = torch.cat([network.jvp(take(x, slice(n, n + 1)), v) for n in range(num_rows(x))], 1)
    rows = relative(torch.einsum("ncp,kp->knc", network.jacobian(x), v), each)
    return max(error, 1e4 * relative(pulled, gradients), 1e4 * adjoint, 1e4 * rows), against


def relative(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).abs().max() / expected.abs().max())


def _two_pullbacks_error(network: Linearisation, x: Any, v: Tensor, jv: Tensor) -> float:
    """The error of `φv` against the derivative of `u ↦ φᵀu`."""
    w = network.weights.requires_grad_()
    with forward_mode_kernels(), network.shell.opened():
        f = network.shell(network.unflatten(w), x).reshape(num_rows(x), -1)
        u = torch.zeros_like(f).requires_grad_()
        (pulled,) = torch.autograd.grad(f, w, u, create_graph=True)
        twice = torch.stack([torch.autograd.grad(pulled, u, t, retain_graph=True)[0] for t in v])
    return relative(twice, jv)


def _products(outcome: Outcome, module: nn.Module, x: Any) -> None:
    outcome.size = Linearisation(module).num_parameters
    try:
        precise = copy.deepcopy(module).double()
        before = state(precise)
        wide = place(x, torch.device("cpu"), torch.float64)
        with Widened():
            outcome.error, outcome.against = product_error(Linearisation(precise), wide)
        if not same(before, state(precise)):
            raise RuntimeError("the copy in float64 was changed")
    except Exception as error:
        outcome.notices.append(f"products in float64: {type(error).__name__}: {error}")


def _fit(outcome: Outcome, module: nn.Module, x: Any) -> None:
    targets = torch.randn(Linearisation(module)(x).shape)
    la = LinearisedLaplace(module, "regression", prior=IsotropicPrior(precision=10.0), num_samples=2, method="exact")
    la.fit([(x, targets)], progress=False)
    outcome.fitted = bool(torch.isfinite(la.predict(x).variance).all())


def _call_as_if_trained(module: nn.Module, x: Any) -> None:
    """Builds lazy parts, moves weights off their initial zeros, and gives batch norms the statistics of the batch.

    Otherwise rectifiers would be at their kink, or signals smaller than any step of a difference.
    """
    args, kwargs = arguments(x)
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    with torch.no_grad():
        module.eval()(*args, **kwargs)
        for p in module.parameters():
            if p.is_floating_point():
                p.add_(0.02 * torch.randn_like(p))
        for _ in range(30 if norms else 0):
            module.train()(*args, **kwargs)
    module.eval()


def run(library: str, name: str, build: Callable[[], tuple[nn.Module, Any]]) -> Outcome:
    """Builds the network and records what works."""
    outcome = Outcome(library, name)
    with warnings.catch_warnings(record=True) as caught, torch.random.fork_rng():
        warnings.simplefilter("always")
        torch.manual_seed(0)
        try:
            module, x = build()
            _call_as_if_trained(module, x)
            before = state(module)
            _products(outcome, module, x)
            _fit(outcome, module, x)
            outcome.unchanged = same(before, state(module))
        except Exception as error:
            outcome.notices.append(f"{type(error).__name__}: {error}")
    ours = [str(w.message) for w in caught if "Jacobian" in str(w.message) or "floating point" in str(w.message)]
    outcome.notices += ours
    return outcome
