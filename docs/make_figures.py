"""Draw the picture of the README and the home page: `python docs/make_figures.py`."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from sklearn.datasets import load_digits
from torch import Tensor, nn

from laplace_sampling import LinearisedLaplace
from laplace_sampling.plots import plot_error_bars

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.comparison.report import read_means  # noqa: E402


def trained(model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor, steps: int) -> nn.Module:
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(model(x), y).backward()
        optimiser.step()
    return model.eval()


def regression(plain: Axes, with_error_bars: Axes) -> None:
    """One input, one output, and no data in the middle."""
    torch.manual_seed(0)
    x = torch.cat([torch.linspace(-2, -0.7, 50), torch.linspace(0.6, 2, 50)])[:, None]
    y = torch.sin(3 * x) + 0.2 * torch.randn(100, 1)
    layers = [nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)]
    model = trained(nn.Sequential(*layers), nn.MSELoss(), x, y, 400)
    la = LinearisedLaplace(model, "regression").fit_hyperparameters([(x, y)], progress=False)
    grid = torch.linspace(-2.5, 2.5, 300)[:, None]
    pred = la.predict(grid)
    plain.plot(grid[:, 0], pred.mean[:, 0])
    plot_error_bars(pred, grid, ax=with_error_bars, num_samples=0)
    for axes, title in ((plain, "a trained network"), (with_error_bars, "with error bars")):
        axes.plot(x[:, 0], y[:, 0], "k.", markersize=3)
        axes.set(title=title, xlim=(-2.5, 2.5), ylim=(-4.5, 4.5), xticks=[], yticks=[], xlabel="", ylabel="")
        if axes.get_legend():
            axes.get_legend().remove()


def strange_images(axes: Axes) -> None:
    """Images sorted by novelty: digits that were left out of training beside pictures of no digit."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(labels)
    torch.manual_seed(0)
    layers = [nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)]
    model = trained(nn.Sequential(nn.Flatten(), *layers), nn.CrossEntropyLoss(), x[:1200], y[:1200], 200)
    la = LinearisedLaplace(model, "classification", parameters="last_layer")
    data = [(x[:1200], y[:1200])]
    la.fit_hyperparameters(data, progress=False)
    la.calibrate_novelty(data)
    generator = torch.Generator().manual_seed(1)
    new = x[1200:].reshape(-1, 8, 8)[torch.randperm(597, generator=generator)[:18]]
    patches = torch.nn.functional.interpolate(2.0 * torch.randint(2, (6, 1, 4, 4), generator=generator) - 1, size=8)[
        :, 0
    ]
    strange = torch.cat([new[:3].flip(-1) * -1, 2 * torch.rand(3, 8, 8, generator=generator) - 1, patches])
    novelty = la.predict(torch.cat([new, strange]).reshape(-1, 1, 64)).novelty
    order = novelty.argsort(stable=True)
    shown = torch.cat([new, strange])[order].reshape(3, 10, 8, 8)
    mosaic = nn.functional.pad(shown, (1, 1, 1, 1), value=1).permute(0, 2, 1, 3).reshape(30, 100)
    axes.imshow(mosaic, cmap="gray_r", vmin=-1, vmax=1)
    for place, index in enumerate(order.tolist()):
        if index >= len(new):
            corner = (place % 10 * 10 - 0.5, place // 10 * 10 - 0.5)
            axes.add_patch(plt.Rectangle(corner, 10, 10, fill=False, edgecolor="#d95f02", linewidth=1.8, clip_on=False))
    axes.set(xticks=[], yticks=[], title="images sorted by novelty")
    axes.set_xlabel("no digit: framed; the least novel comes first", fontsize="small")


def costs(axes: Axes) -> None:
    """The gain on test data against the cost, by the records of the comparison."""
    shown = {
        "temperature scaling": ("temperature", (8, -4), "left"),
        "ours, last layer, validation": ("last layer", (0, -13), "center"),
        "ours, validation": ("all weights", (-2, 7), "center"),
        "ours": ("all weights,\nno validation data", (0, -26), "center"),
        "laplace-torch, last layer": ("laplace-torch,\nlast layer", (0, -26), "center"),
        "MC dropout": ("dropout", (-2, -12), "center"),
        "SNGP": ("SNGP", (7, -4), "left"),
        "ensemble of 5": ("ensemble of 5", (-2, 7), "center"),
    }
    rows = [row for row in read_means(ROOT / "benchmarks/records/means.csv") if row["suite"] == "second"]
    alone = {
        row["case"]: row["log_likelihood"] for row in rows if row["method"] == "MAP" and row["accuracy"] is not None
    }
    for method, (name, offset, side) in shown.items():
        of_method = [row for row in rows if row["method"] == method and row["case"] in alone]
        networks = [int(row["seeds"]) for row in of_method]
        gain = np.average([row["log_likelihood"] - alone[row["case"]] for row in of_method], weights=networks)
        epochs = np.average([row["epochs_fit"] or 0 for row in of_method], weights=networks)
        ours = method.startswith("ours")
        axes.plot(epochs, gain, "o" if ours else "s", color="#d95f02" if ours else "#555555", markersize=6)
        axes.annotate(name, (epochs, gain), offset, textcoords="offset points", ha=side, fontsize="x-small")
    axes.set_xscale("symlog", linthresh=1)
    axes.set(
        xlim=(-0.25, 400),
        ylim=(0, 0.165),
        xlabel="training epochs (orange: this library)",
        title="gain in log-likelihood, nats",
    )
    axes.set_xticks([0, 1, 10, 100], ["0", "1", "10", "100"])
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    figure = plt.figure(figsize=(12, 3), dpi=110, layout="constrained")
    left, middle, right = figure.subfigures(1, 3, width_ratios=[4.6, 4, 3.6])
    regression(*left.subplots(1, 2))
    strange_images(middle.subplots())
    costs(right.subplots())
    (ROOT / "docs/images").mkdir(exist_ok=True)
    figure.savefig(ROOT / "docs/images/front.png", metadata={"Software": None})
