"""Which pixels of a segmentation are wrong: error bars of a U-Net on images of 64 × 64 pixels with 5 classes.

The images are discs, squares, triangles and crosses on a background, with noise and low contrast. `python
examples/segmentation.py [picture.png]` trains, fits, predicts and reports how well the uncertainty finds wrong pixels.
"""

import math
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import Auto, Categorical, ClassificationPrediction, LinearisedLaplace

SIZE, CLASSES = 64, 5
NAMES = ("background", "disc", "square", "triangle", "cross")


def draw(num: int, seed: int, noise: float = 0.35) -> tuple[Tensor, Tensor]:
    """Images `[N, 1, 64, 64]` and labels `[N, 64, 64]`."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    axis = torch.arange(SIZE).float()
    rows, columns = torch.meshgrid(axis, axis, indexing="ij")
    images, labels = torch.zeros(num, SIZE, SIZE), torch.zeros(num, SIZE, SIZE, dtype=torch.long)
    for image, label in zip(images, labels, strict=True):
        for _ in range(4):
            kind = int(torch.randint(1, CLASSES, (), generator=generator))
            radius, angle = uniform(6, 12), uniform(0, 2 * math.pi)
            u, v = rows - uniform(8, SIZE - 8), columns - uniform(8, SIZE - 8)
            a, b = u * math.cos(angle) + v * math.sin(angle), v * math.cos(angle) - u * math.sin(angle)
            inside = {
                1: a**2 + b**2 < radius**2,
                2: torch.maximum(a.abs(), b.abs()) < 0.85 * radius,
                3: (a > -0.6 * radius) & (a + 1.8 * b.abs() < 1.1 * radius),
                4: (torch.minimum(a.abs(), b.abs()) < 0.3 * radius) & (torch.maximum(a.abs(), b.abs()) < radius),
            }[kind]
            image[inside], label[inside] = uniform(0.4, 1.0), kind
    return (images + noise * torch.randn(images.shape, generator=generator))[:, None], labels


class UNet(nn.Module):
    """Three scales, batch normalisation, skip connections."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._block(1, width), self._block(width, 2 * width)])
        self.middle = self._block(2 * width, 4 * width)
        self.up = nn.ModuleList([self._block(6 * width, 2 * width), self._block(3 * width, width)])
        self.head = nn.Conv2d(width, CLASSES, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            skips.append(block(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], dim=1))
        return self.head(x)


def train(x: Tensor, y: Tensor, epochs: int = 25) -> UNet:
    torch.manual_seed(0)
    model = UNet()
    loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, epochs * len(loader))
    for _ in range(epochs):
        for inputs, labels in loader:
            optimiser.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimiser.step()
            schedule.step()
    return model


def run(
    num_train: int = 36, num_held_out: int = 20, num_test: int = 30, epochs: int = 35
) -> tuple[Tensor, Tensor, Tensor, ClassificationPrediction]:
    """Train, fit and predict: test images, their labels, the network's outputs and the prediction."""
    x, y = draw(num_train, seed=0)
    held_out = TensorDataset(*draw(num_held_out, seed=5))
    model = train(x, y, epochs)
    print(f"trained in {time.process_time():.0f} s", flush=True)
    # Few weights and many pixels: a column of the Jacobian for each weight, by forward mode, and dense algebra. The
    # mode of this linear model is sharper than the network, so curvature there says little.
    la = LinearisedLaplace(
        model,
        Categorical(class_dim=1),
        parameters="head.*",
        num_samples=16,
        method=Auto(max_memory=2**32),
    )
    loader, val_loader = (DataLoader(data, batch_size=12) for data in (TensorDataset(x, y), held_out))
    la.fit_hyperparameters(loader, val_loader=val_loader, tolerance=0.05, progress=False)
    print(f"fitted in {time.process_time():.0f} s: {la}", flush=True)
    images, labels = draw(num_test, seed=2)
    pred = la.predict(images)
    assert isinstance(pred, ClassificationPrediction)
    with torch.no_grad():
        outputs = model.eval()(images)
    return images, labels, outputs, pred


def report(labels: Tensor, outputs: Tensor, pred: ClassificationPrediction) -> dict[str, float]:
    """Accuracy, log-likelihood of a pixel, and the area under the ROC curve of finding wrong pixels."""
    from sklearn.metrics import roc_auc_score

    wrong = (pred.outputs.argmax(1) != labels).flatten()
    plain = outputs.softmax(1)

    def found(score: Tensor) -> float:
        return float(roc_auc_score(wrong, score.flatten()))

    def log_likelihood(probs: Tensor) -> float:
        return float(probs.gather(1, labels[:, None]).log().mean())

    return {
        "wrong pixels": float(wrong.float().mean()),
        "log-likelihood of the network": log_likelihood(plain),
        "log-likelihood": log_likelihood(pred.probs),
        "AUROC of the network's entropy": found(torch.special.entr(plain).sum(1)),
        "AUROC of the entropy": found(pred.entropy),
        "AUROC of the mutual information": found(pred.mutual_information),
        "mutual information at wrong pixels": float(pred.mutual_information.flatten()[wrong].mean()),
        "mutual information at right pixels": float(pred.mutual_information.flatten()[~wrong].mean()),
    }


def picture(images: Tensor, labels: Tensor, pred: ClassificationPrediction, path: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    chosen = pred.outputs.argmax(1)
    columns = {
        "image": (images[:, 0], "gray", None),
        "labels": (labels, "tab10", 9),
        "prediction": (chosen, "tab10", 9),
        "wrong": ((chosen != labels).float(), "gray", 1),
        "entropy": (pred.entropy, "magma", None),
        "mutual information": (pred.mutual_information, "magma", None),
    }
    figure, axes = plt.subplots(3, len(columns), figsize=(2 * len(columns), 6.4), layout="constrained")
    for row, line in enumerate(axes):
        for axis, (title, (values, colours, most)) in zip(line, columns.items(), strict=True):
            limits = {} if most is None else {"vmin": 0, "vmax": most}
            axis.imshow(values[row], cmap=colours, interpolation="nearest", **limits)
            axis.axis("off")
            if row == 0:
                axis.set_title(title)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    started = time.perf_counter()
    test_images, test_labels, network_outputs, prediction = run()
    for name, value in report(test_labels, network_outputs, prediction).items():
        print(f"{name:36} {value:.4g}")
    print(f"{time.perf_counter() - started:.0f} s, {time.process_time():.0f} s of the processor")
    if len(sys.argv) > 1:
        picture(test_images, test_labels, prediction, sys.argv[1])
