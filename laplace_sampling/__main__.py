"""`python -m laplace_sampling`: error bars on data bundled with scikit-learn, and a picture."""

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import ClassificationPrediction, Evidence, LinearisedLaplace, RegressionPrediction
from laplace_sampling.solvers.progress import progress_bar


@dataclass(frozen=True)
class Data:
    """Standardised training and test data."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @property
    def loader(self) -> DataLoader:
        return DataLoader(TensorDataset(self.x, self.y), batch_size=100, shuffle=True)


def digits(num_train: int = 600, noise: float = 0.75, seed: int = 0) -> Data:
    """8×8 digits with Gaussian pixel noise, which makes the task hard enough for error bars to matter."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(seed)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], torch.tensor(labels)[order]
    x = (x - x.mean()) / x.std() + noise * torch.randn(x.shape, generator=generator)
    return Data(x[:num_train], y[:num_train], x[num_train:], y[num_train:])


def diabetes(num_train: int = 350, seed: int = 0) -> Data:
    """Progression of diabetes from ten measurements; inputs and targets standardised on the training set."""
    from sklearn.datasets import load_diabetes

    measurements, progression = load_diabetes(return_X_y=True)
    order = torch.randperm(len(measurements), generator=torch.Generator().manual_seed(seed))
    x = torch.tensor(measurements, dtype=torch.float32)[order]
    y = torch.tensor(progression, dtype=torch.float32)[order, None]
    x, y = ((t - t[:num_train].mean(0)) / t[:num_train].std(0) for t in (x, y))
    return Data(x[:num_train], y[:num_train], x[num_train:], y[num_train:])


def cnn() -> nn.Sequential:
    """Three convolutions with batch norm, about 3,100 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 14, 3, stride=2, padding=1), nn.BatchNorm2d(14), nn.ReLU(),
        nn.Conv2d(14, 14, 3, stride=2, padding=1), nn.BatchNorm2d(14), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(14, 10),
    )  # fmt: skip


def mlp(inputs: int, width: int = 50, depth: int = 1) -> nn.Sequential:
    """Hidden layers of one width, tanh."""
    layers: list[nn.Module] = []
    for size in [inputs] + [width] * (depth - 1):
        layers += [nn.Linear(size, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def train(
    make: Callable[[], nn.Module], data: Data, loss: nn.Module, epochs: int, name: str, weight_decay: float = 1e-4
) -> nn.Module:
    """A network trained by Adam, as a user would come with one."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
        optimiser = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=weight_decay)
        for _ in progress_bar(f"{name}: training", range(epochs)):
            for x, y in data.loader:
                optimiser.zero_grad()
                loss(model(x), y).backward()
                optimiser.step()
    return model.eval()


def calibration_error(probs: Tensor, y: Tensor, num_bins: int = 15) -> float:
    """Expected calibration error over bins of equal width of the highest probability."""
    confidence, label = probs.max(-1)
    bins = (confidence * num_bins).long().clamp_max(num_bins - 1)
    gap = torch.zeros(num_bins).index_add(0, bins, confidence - (label == y).float())
    return float(gap.abs().sum() / len(y))


def interval_error(mean: Tensor, stddev: Tensor, y: Tensor) -> float:
    """Mean distance between the nominal level of central intervals (5 to 95 %) and how many targets they cover."""
    levels = torch.arange(0.05, 1.0, 0.05)
    reach = torch.erf((y - mean).abs() / stddev / math.sqrt(2)).flatten()
    return float((levels - (reach[:, None] <= levels).float().mean(0)).abs().mean())


def classify(seconds: dict[str, float]) -> list[tuple[str, str, float, float, float]]:
    """Rows of the table for the digits."""
    data, name = digits(), "digits, CNN"
    start = time.perf_counter()
    model = train(cnn, data, nn.CrossEntropyLoss(), 100, name)
    seconds[f"{name}: training"] = time.perf_counter() - start
    start = time.perf_counter()
    la = LinearisedLaplace(model, "classification")
    la.fit_hyperparameters(data.loader)
    seconds[f"{name}: fit_hyperparameters ({len(la.history_)} EM steps)"] = time.perf_counter() - start
    print(la)
    start = time.perf_counter()
    pred = la.predict(data.x_test)
    assert isinstance(pred, ClassificationPrediction)
    seconds[f"{name}: predict ({len(data.x_test)} inputs, 64 samples)"] = time.perf_counter() - start
    rows = []
    for label, probs in (("network", pred.logits.softmax(-1)), ("ours", pred.probs)):
        log_prob = probs.log()[torch.arange(len(probs)), data.y_test].mean()
        accuracy = (probs.argmax(-1) == data.y_test).float().mean()
        rows.append((name, label, float(log_prob), calibration_error(probs, data.y_test), float(accuracy)))
    return rows


def regress(seconds: dict[str, float]) -> list[tuple[str, str, float, float, float]]:
    """Rows of the table for diabetes."""
    data, name = diabetes(), "diabetes, MLP"
    start = time.perf_counter()
    model = train(lambda: mlp(10), data, nn.MSELoss(), 150, name)
    seconds[f"{name}: training"] = time.perf_counter() - start
    start = time.perf_counter()
    la = LinearisedLaplace(model, "regression")
    la.fit_hyperparameters(data.loader, criterion=Evidence(max_steps=30))
    seconds[f"{name}: fit_hyperparameters ({len(la.history_)} EM steps)"] = time.perf_counter() - start
    print(la)
    pred = la.predict(data.x_test)
    assert isinstance(pred, RegressionPrediction)
    with torch.no_grad():
        residual = (model(data.x) - data.y).std()  # what a plain network has: the noise of its training residuals
    rmse = float((pred.mean - data.y_test).square().mean().sqrt())
    rows = []
    stddev = (pred.variance + pred.noise_variance).sqrt()
    for label, scale in (("network", residual.expand(stddev.shape)), ("ours", stddev)):
        log_prob = torch.distributions.Normal(pred.mean, scale).log_prob(data.y_test).mean()
        rows.append((name, label, float(log_prob), interval_error(pred.mean, scale, data.y_test), rmse))
    return rows


def picture(path: Path) -> None:
    """A 1-D regression with a gap in the data, and its error bars, to a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    generator = torch.Generator().manual_seed(1)
    x = torch.cat([torch.linspace(-2, -0.7, 40), torch.linspace(0.5, 2, 40)])[:, None]
    y = torch.sin(3 * x) + 0.15 * torch.randn(x.shape, generator=generator)
    data = Data(x, y, x, y)
    model = train(lambda: mlp(1, depth=2), data, nn.MSELoss(), 1000, "picture")
    la = LinearisedLaplace(model, "regression").fit_hyperparameters(data.loader, criterion=Evidence(max_steps=30))
    grid = torch.linspace(-3.2, 3.2, 300)[:, None]
    pred = la.predict(grid)
    assert isinstance(pred, RegressionPrediction)
    line, mean, stddev = grid[:, 0], pred.mean[:, 0], pred.stddev[:, 0]
    total = (pred.variance + pred.noise_variance).sqrt()[:, 0]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.fill_between(line, mean - 2 * total, mean + 2 * total, color="C0", alpha=0.15, label="±2 sd of observations")
    axes.fill_between(line, mean - 2 * stddev, mean + 2 * stddev, color="C0", alpha=0.3, label="±2 sd of the function")
    axes.plot(line, pred.samples[:4, :, 0].T, color="C0", linewidth=0.7, alpha=0.7)
    axes.plot(line, mean, color="C3", label="the network")
    axes.plot(x, y, "k.", markersize=4, label="data")
    axes.set(xlabel="x", ylabel="y", ylim=(-4, 4))
    axes.legend(loc="upper center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(prog="python -m laplace_sampling", description=__doc__)
    parser.add_argument("--figure", type=Path, default=Path("laplace_sampling_demo.png"), help="where the picture goes")
    args = parser.parse_args()
    try:
        import matplotlib  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        sys.exit(f'The demo needs {error.name}: pip install "laplace_sampling[demo]"')
    start = time.perf_counter()
    seconds: dict[str, float] = {}
    rows = regress(seconds) + classify(seconds)
    picture(args.figure)
    print(f"\n{'task':<16}{'error bars':<12}{'test log-lik.':>14}{'calib. error':>14}{'RMSE or accuracy':>18}")
    for task, label, log_prob, error, score in rows:
        print(f"{task:<16}{label:<12}{log_prob:>14.3f}{error:>14.3f}{score:>18.3f}")
    print()
    for what, value in seconds.items():
        print(f"{what:<60}{value:>8.1f} s")
    print(f"{'all':<60}{time.perf_counter() - start:>8.1f} s")
    print(f"1-D regression with error bars: {args.figure.resolve()}")


if __name__ == "__main__":
    # linear_operator and gpytorch use torch.jit.script, deprecated in torch 2.15.
    warnings.filterwarnings("ignore", message=".*torch.jit.*", category=FutureWarning)
    main()
