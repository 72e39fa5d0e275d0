"""Error bars of a network for 8×8 digits, on data bundled with scikit-learn: `python examples/demo.py`.

It prints the mean log probability and the accuracy on test data, of the network alone and with error bars, and draws
how often predictions are right that claim to be.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import ClassificationPrediction, LinearisedLaplace
from laplace_sampling.plots import plot_reliability


def digits(num_train: int = 600, noise: float = 0.75, seed: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """Training and test data with Gaussian pixel noise, which makes the task hard enough for error bars to matter."""
    images, labels = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(seed)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], torch.tensor(labels)[order]
    x = (x - x.mean()) / x.std() + noise * torch.randn(x.shape, generator=generator)
    return TensorDataset(x[:num_train], y[:num_train]), TensorDataset(x[num_train:], y[num_train:])


def cnn() -> nn.Sequential:
    """Three convolutions with batch norm, about 3,100 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 14, 3, stride=2, padding=1), nn.BatchNorm2d(14), nn.ReLU(),
        nn.Conv2d(14, 14, 3, stride=2, padding=1), nn.BatchNorm2d(14), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(14, 10),
    )  # fmt: skip


def trained(data: TensorDataset, epochs: int) -> nn.Module:
    """A network trained by Adam, as a user would come with one."""
    torch.manual_seed(0)
    model = cnn()
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=1e-4)
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=100, shuffle=True):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
    return model.eval()


def main(figure: str) -> None:
    train_data, test_data = digits()
    model = trained(train_data, 100)
    la = LinearisedLaplace(model, "classification").fit_hyperparameters(DataLoader(train_data, batch_size=100))
    print(la)
    x, y = test_data.tensors
    pred = la.predict(x)
    assert isinstance(pred, ClassificationPrediction)

    def show(name: str, probs: Tensor) -> None:
        log_prob, accuracy = probs.log()[torch.arange(len(y)), y].mean(), (probs.argmax(-1) == y).float().mean()
        print(f"{name:<24} log probability {log_prob:.3f}, accuracy {accuracy:.3f}")

    show("network", pred.logits.softmax(-1))
    show("network with error bars", pred.probs)
    plot_reliability(pred, y).figure.savefig(figure)
    print(f"How often predictions are right that claim to be: {figure}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", default="laplace_sampling_demo.png", help="where the picture goes")
    main(parser.parse_args().figure)
