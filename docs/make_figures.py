"""Draw the pictures of the documentation: `python docs/make_figures.py`."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import nn

from laplace_sampling import LinearisedLaplace
from laplace_sampling.plots import plot_error_bars

IMAGES = Path(__file__).parent / "images"


def regression() -> None:
    """One input, one output, and no data in the middle."""
    torch.manual_seed(0)
    x = torch.cat([torch.linspace(-2, -0.7, 50), torch.linspace(0.6, 2, 50)])[:, None]
    y = torch.sin(3 * x) + 0.2 * torch.randn(100, 1)
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(400):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimiser.step()

    la = LinearisedLaplace(model, "regression").fit_hyperparameters([(x, y)], progress=False)
    grid = torch.linspace(-2.5, 2.5, 300)[:, None]
    _, axes = plt.subplots(figsize=(8, 4), dpi=100, layout="constrained")
    plot_error_bars(la.predict(grid), grid, ax=axes, num_samples=4)
    axes.plot(x[:, 0], y[:, 0], "k.", markersize=4, label="data")
    axes.set(xlabel="x", ylabel="y", xlim=(-2.5, 2.5), ylim=(-6.5, 4))
    axes.legend(ncols=3, fontsize="small", loc="lower center", frameon=False)
    plt.savefig(IMAGES / "regression.png", metadata={"Software": None})
    plt.close()


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    regression()
