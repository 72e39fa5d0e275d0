"""Which networks work: each is run, and the table of `docs/compatibility.md` is written.

`python -m benchmarks.compatibility [--only torch.nn] [--write]`. Networks are small and have random weights. For each:

- Jacobian products against central differences and against two reverse passes, in float64;
- adjointness, `⟨φv, u⟩ = ⟨v, φᵀu⟩`;
- a fit of a few samples on a few data, and a prediction, by `LinearisedLaplace`;
- the module before and after: weights, buffers, gradients, modes, hooks and attributes.
"""

import argparse
import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.compatible_networks import NETWORKS
from laplace_sampling import LinearisedLaplace
from laplace_sampling.forward_mode import forward_mode_kernels
from laplace_sampling.held_module import evaluation_mode
from laplace_sampling.linearise import Linearisation

TABLE = Path(__file__).parents[1] / "docs" / "compatibility.md"
TOLERANCE = 1e-5
HEAD = """# Which networks work

Each network of this table was built with random weights and run by `python -m benchmarks.compatibility --write`.
Products are compared in float64 with central differences, or with two reverse passes where a kink is within the step:
`error` is relative to the largest entry, and at most 1e-5 where it passes. They are adjoint to 1e-9. Then
`LinearisedLaplace` is fitted on a few data and predicts. Afterwards the module is the same in weights, buffers, modes,
hooks and attributes, bit for bit. The last column tells where a slower way is taken, or what failed.

| library | network | weights | error | fit and prediction | unchanged | notice or error |
|---|---|---|---|---|---|---|
"""


@dataclass
class Outcome:
    """What happened to one network."""

    library: str
    name: str
    size: int = 0
    error: float = float("nan")
    fitted: bool = False
    unchanged: bool = False
    notices: list[str] = field(default_factory=list)

    @property
    def works(self) -> bool:
        return self.error <= TOLERANCE and self.fitted and self.unchanged

    def row(self) -> str:
        said = "; ".join(dict.fromkeys(self.notices)).replace("|", "\\|").replace("\n", " ")
        yes = {True: "yes", False: "**no**"}
        return (
            f"| {self.library} | {self.name} | {self.size:,} | {self.error:.0e} | {yes[self.fitted]} | "
            f"{yes[self.unchanged]} | {said} |"
        )


def state(module: nn.Module) -> dict[str, Any]:
    """All of a module that a user would notice if it changed."""
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


def product_error(network: Linearisation, x: Tensor) -> float:
    """Of `φv` against central differences, at the better of two steps; that of adjointness counts 10,000 times."""
    generator = torch.Generator().manual_seed(1)
    v = torch.randn(2, network.num_parameters, generator=generator, dtype=torch.float64)
    v /= v.norm(dim=1, keepdim=True) / network.weights.norm()
    jv = network.jvp(x, v)

    def f(w: Tensor) -> Tensor:
        return network._apply(network.unflatten(w), x).reshape(len(x), -1)

    errors = []
    with torch.no_grad():
        module, network = network.module, copy.copy(network)
        network.module = copy.deepcopy(module).eval()
        for h in (1e-4, 1e-5):
            difference = torch.stack([(f(network.weights + h * t) - f(network.weights - h * t)) / (2 * h) for t in v])
            errors.append(float((difference - jv).abs().max() / jv.abs().max()))
        network.module = module
    if min(errors) > TOLERANCE:  # kinks of piecewise linear networks within the step
        errors.append(_two_pullbacks_error(network, x, v, jv))
    u = torch.randn(jv.shape, generator=generator, dtype=torch.float64)
    left, right = (jv * u).sum((1, 2)), (v * network.vjp(x, u)).sum(1)
    adjoint = float((left - right).abs().max() / (jv.norm() * u.norm()))
    return max(min(errors), 1e4 * adjoint)


def _two_pullbacks_error(network: Linearisation, x: Tensor, v: Tensor, jv: Tensor) -> float:
    """Of `φv` against the derivative of `u ↦ φᵀu`."""
    w = network.weights.requires_grad_()
    with forward_mode_kernels(), evaluation_mode(network.module):
        f = network._apply(network.unflatten(w), x).reshape(len(x), -1)
        u = torch.zeros_like(f).requires_grad_()
        (pulled,) = torch.autograd.grad(f, w, u, create_graph=True)
        twice = torch.stack([torch.autograd.grad(pulled, u, t, retain_graph=True)[0] for t in v])
    return float((twice - jv).abs().max() / jv.abs().max())


def _products(outcome: Outcome, module: nn.Module, x: Tensor) -> None:
    outcome.size = Linearisation(module).num_parameters
    try:
        precise = copy.deepcopy(module).double()
        before = state(precise)
        outcome.error = product_error(Linearisation(precise), x.double() if x.is_floating_point() else x)
        if not same(before, state(precise)):
            raise RuntimeError("the copy in float64 was changed")
    except Exception as error:
        outcome.notices.append(f"products in float64: {type(error).__name__}: {error}")


def _fit(outcome: Outcome, module: nn.Module, x: Tensor) -> None:
    targets = torch.randn(Linearisation(module)(x).shape)
    la = LinearisedLaplace(module, "regression", prior="isotropic", prior_precision=10.0, num_samples=2, method="exact")
    la.fit([(x, targets)], progress=False)
    outcome.fitted = bool(torch.isfinite(la.predict(x).variance).all())


def run(library: str, name: str, build: Callable[[], tuple[nn.Module, Tensor]]) -> Outcome:
    """Build the network, and see what works."""
    outcome = Outcome(library, name)
    with warnings.catch_warnings(record=True) as caught, torch.random.fork_rng():
        warnings.simplefilter("always")
        torch.manual_seed(0)
        try:
            module, x = build()
            with torch.no_grad():
                module.eval()(x)  # as a trained network has been; makes what is made lazily
            before = state(module)
            _products(outcome, module, x)
            _fit(outcome, module, x)
            outcome.unchanged = same(before, state(module))
        except Exception as error:
            outcome.notices.append(f"{type(error).__name__}: {error}")
    ours = [str(w.message) for w in caught if "Jacobian" in str(w.message) or "floating point" in str(w.message)]
    outcome.notices += ours
    return outcome


def outcomes(only: str | None = None) -> list[Outcome]:
    found = []
    for library, name, build in NETWORKS:
        if only in (None, library):
            outcome = run(library, name, build)
            print(outcome.row(), flush=True)
            found.append(outcome)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    found = outcomes(args.only)
    print(f"{sum(o.works for o in found)} of {len(found)} work")
    if args.write:
        tail = f"\n{sum(o.works for o in found)} of {len(found)} work."
        TABLE.write_text(HEAD + "\n".join(o.row() for o in found) + "\n" + tail + "\n")


if __name__ == "__main__":
    main()
