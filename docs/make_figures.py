"""Draw the pictures of the documentation: `python docs/make_figures.py`."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import nn

from laplace_sampling import LinearisedLaplace

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
    pred = la.predict(grid)
    mean, function = pred.mean[:, 0], pred.stddev[:, 0]
    observation = (pred.variance[:, 0] + pred.noise_variance).sqrt()

    _, axes = plt.subplots(figsize=(8, 4), dpi=100, layout="constrained")
    t = grid[:, 0]
    bands = ((observation, "C0", 0.15, "observation, ± 2 s.d."), (function, "C0", 0.3, "function, ± 2 s.d."))
    for deviation, colour, alpha, label in bands:
        low, high = mean - 2 * deviation, mean + 2 * deviation
        axes.fill_between(t, low, high, color=colour, alpha=alpha, linewidth=0, label=label)
    for k in range(4):
        label = "joint samples of the function" if k == 0 else None
        axes.plot(t, pred.samples[k, :, 0], color="C1", linewidth=0.8, label=label)
    axes.plot(t, mean, color="C0", linewidth=2, label="network output")
    axes.plot(x[:, 0], y[:, 0], "k.", markersize=4, label="data")
    axes.set(xlabel="x", ylabel="y", xlim=(-2.5, 2.5), ylim=(-6.5, 4))
    axes.legend(ncols=3, fontsize="small", loc="lower center", frameon=False)
    plt.savefig(IMAGES / "regression.png", metadata={"Software": None})
    plt.close()


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    regression()
