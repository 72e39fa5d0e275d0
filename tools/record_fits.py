"""A record of some 60 small fits, to compare the numbers of two versions.

`PYTHONPATH=. python tools/record_fits.py write FILE [PART OF A KEY]` fits with the package that is found there, and
`python tools/record_fits.py compare OLD NEW [TOLERANCE]` lists what differs by more, relative to the largest number of
each tensor.
"""

import sys
import time
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from laplace_sampling import SGD, SVRG, Evidence, Gaussian, LinearisedLaplace, Stochastic, from_loss

METHODS = ["exact", "krylov", "svrg", "sgd", "dual", "kfac", "diagonal", "subset", "auto", "last_layer"]
OUTPUTS = {
    "regression": 1,
    "regression2": 2,
    "classification": 3,
    "binary": 1,
    "poisson": 1,
    "heteroscedastic": 2,
    "heads": 4,
    "from_loss": 3,
}
NETWORKS, PRIORS = ["mlp", "cnn", "tokens"], ["isotropic", "g-prior", "layerwise"]
CRITERIA = ["auto", "evidence", "leave_one_out", "self_consistency", "validation", "given"]
# These take 20 seconds and more each, since stochastic gradients do not converge.
SLOW = ("svrg-heteroscedastic-tokens", "sgd-poisson-tokens", "sgd-from_loss-cnn", "diagonal-heteroscedastic-mlp")
F = nn.functional


class Heads(nn.Module):
    """Two heads of one network."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.body(x)
        return {"size": out[:, :1], "kind": out[:, 1:]}


class Tokens(nn.Module):
    """Attention over three tokens."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(2, 6), nn.LayerNorm(6)
        self.attend, self.last = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.unflatten(1, (3, 2)))
        normed = self.norm(h)
        h = h + self.attend(normed, normed, normed, need_weights=False)[0]
        return self.last(h.mean(1))


def network(kind: str, num_outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, num_outputs))
    if kind == "tokens":
        return Tokens(num_outputs)
    head = [nn.ReLU(), nn.Flatten(), nn.Linear(48, num_outputs)]
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.BatchNorm2d(4), *head)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def targets_of(likelihood: str, f: Tensor, noise: Tensor) -> Any:
    values, label = f + 0.3 * noise, (2 * f + noise).argmax(1)
    return {
        "regression": values[:, :1],
        "regression2": values[:, :2],
        "classification": label,
        "from_loss": label,
        "binary": (f[:, :1] + noise[:, :1] > 0).double(),
        "poisson": (f[:, :1].clamp(max=1.5) + 0.3 * noise[:, :1]).exp().round(),
        "heteroscedastic": values[:, :1],
        "heads": {"size": values[:, :1], "kind": label},
    }[likelihood]


def training_loss(likelihood: str, f: Any, y: Any) -> Tensor:
    losses: dict[str, Callable[[], Tensor]] = {
        "binary": lambda: F.binary_cross_entropy_with_logits(f, y),
        "poisson": lambda: F.poisson_nll_loss(f, y),
        "heteroscedastic": lambda: F.gaussian_nll_loss(f[:, :1], y, f[:, 1:].exp()),
        "heads": lambda: F.mse_loss(f["size"], y["size"]) + F.cross_entropy(f["kind"], y["kind"]),
    }
    plain = F.mse_loss if likelihood.startswith("regression") else F.cross_entropy
    return losses.get(likelihood, lambda: plain(f, y))()


def problem(kind: str, likelihood: str, seed: int) -> tuple[nn.Module, Any, list, list, Tensor]:
    """A trained network, its likelihood, training data, held-out data, and inputs to predict."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 6, dtype=torch.float64, generator=g)
    f = torch.stack([x[:, 0] + x[:, 1] ** 2, x[:, 2] - x[:, 3], (2 * x[:, 4]).sin()], 1)
    y = targets_of(likelihood, f, torch.randn(60, 3, dtype=torch.float64, generator=g))

    def some(start: int, stop: int) -> tuple[Tensor, Any]:
        part = {name: t[start:stop] for name, t in y.items()} if isinstance(y, dict) else y[start:stop]
        return x[start:stop], part

    model = network(kind, OUTPUTS[likelihood], seed).double()
    model = Heads(model) if likelihood == "heads" else model
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    inputs, targets = some(0, 40)
    for _ in range(60):
        optimiser.zero_grad()
        training_loss(likelihood, model(inputs), targets).backward()
        optimiser.step()
    others = {
        "regression2": "regression",
        "heads": {"size": Gaussian(10.0, learn=False), "kind": "classification"},
        "from_loss": from_loss(cross_entropy),
    }
    return model.eval(), others.get(likelihood, likelihood), [some(0, 25), some(25, 40)], [some(40, 60)], x[36:44]


def rows() -> list[tuple[str, str, str, str, str]]:
    """Each method with each likelihood that it takes; networks, priors and criteria by rotation."""
    found, number = [], 0
    for method in METHODS:
        for likelihood in OUTPUTS:
            if method == "dual" and not likelihood.startswith("regression"):
                continue
            number += 1
            criterion, prior = CRITERIA[(number * 5 + len(method)) % 6], PRIORS[number % 3]
            labels = likelihood in ("classification", "binary")
            if criterion == "leave_one_out" and not labels:
                criterion = "evidence"
            if criterion == "self_consistency" and not labels and likelihood != "poisson":
                criterion = "given"
            if method == "last_layer" and likelihood == "heads":
                continue
            if criterion in ("leave_one_out", "self_consistency") and prior == "layerwise":
                prior = "isotropic"
            found.append((method, likelihood, NETWORKS[(number // 2) % 3], prior, criterion))
    return [row for row in found if not "-".join(row).startswith(SLOW)]


def flat(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).reshape(-1)


def numbers(row: tuple[str, str, str, str, str]) -> dict[str, Any]:
    """What one fit finds and predicts."""
    method, likelihood, kind, prior, criterion = row
    model, of_library, data, held_out, x = problem(kind, likelihood, zlib.crc32("-".join(row).encode()) % 1000)
    methods = {"svrg": Stochastic(solver=SVRG()), "sgd": Stochastic(solver=SGD()), "last_layer": "auto"}
    la = LinearisedLaplace(
        model,
        of_library,
        prior=prior,
        method=methods.get(method, method),
        num_samples=8,
        seed=3,
        parameters="last_layer" if method == "last_layer" else None,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        started = time.process_time()
        if criterion == "given":
            la.fit(data, progress=False)
        else:
            rule = {"validation": "auto", "evidence": Evidence(num_samples=6)}.get(criterion, criterion)
            held_out = held_out if criterion == "validation" else None
            la.fit_hyperparameters(data, held_out, criterion=rule, progress=False)
        seconds = time.process_time() - started
    found = {
        "seconds": seconds,
        "warnings": sorted(str(w.message)[:90] for w in caught),
        "alpha": la.prior_precision_,
        "gamma": la.effective_dimension_,
        "calibration": torch.tensor([float(la.scale_), float(la.temperature_)]),
        "samples": la.samples_[:, :40],
    }
    if la.noise_precision_ is not None:
        found["noise"] = la.noise_precision_
    pred: Any = la.predict(x)
    targets: Any = data[0][1]
    heads = [pred["size"], pred["kind"]] if likelihood == "heads" else [pred]
    for n, head in enumerate(heads):
        found |= {f"outputs{n}": flat(head.outputs), f"covariance{n}": flat(head.covariance())}
        found |= {f"{name}{n}": flat(getattr(head, name)) for name in ("stddev", "probs") if hasattr(head, name)}
    few = {name: t[:8] for name, t in targets.items()} if isinstance(targets, dict) else targets[:8]
    found["log_prob"] = flat(pred.log_prob(few))
    asked: dict[str, Callable[[], Any]] = {
        "evidence": lambda: la.score("evidence").value,
        "mode": lambda: la.mode_,
        "leave_one_out": lambda: la.leave_one_out().log_prob,
    }
    for name, get in asked.items():
        try:
            found[name] = flat(get())
        except ValueError as error:
            found[name] = str(error)[:90]
    return found


def differences(old: dict[str, Any], new: dict[str, Any], tolerance: float) -> list[str]:
    found = []
    for name in sorted((set(old) | set(new)) - {"seconds"}):
        before, after = old.get(name), new.get(name)
        if not (isinstance(before, Tensor) and isinstance(after, Tensor) and before.shape == after.shape):
            if isinstance(before, Tensor) or before != after:
                found.append(f"{name}: {before!r:.150} -> {after!r:.150}")
            continue
        error = float((before - after).abs().max() / before.abs().max().clamp_min(1e-300)) if before.numel() else 0.0
        if not error <= tolerance:
            found.append(f"{name} {error:.1e} ({float(before.flatten()[0]):.5g} -> {float(after.flatten()[0]):.5g})")
    return found


def main(command: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    if command == "write":
        path, part = arguments[0], "".join(arguments[1:2])
        keys = {"-".join(row): row for row in rows()}
        record = {key: numbers(row) for key, row in keys.items() if part in key}
        torch.save(record, path)
        print(f"{len(record)} fits, {sum(each['seconds'] for each in record.values()):.0f} s")
        return
    old, new = (torch.load(path) for path in arguments[:2])
    tolerance, moved = float(arguments[2]) if len(arguments) > 2 else 1e-6, 0
    for key in sorted(set(old) & set(new)):
        if found := differences(old[key], new[key], tolerance):
            moved += 1
            print(key, *found, sep="\n    ")
    print(f"{len(new)} fits, {moved} of which differ by more than {tolerance:g}")


main(*sys.argv[1:])
