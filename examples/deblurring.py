"""Error bars of a picture that was blurred, with the physics of deepinv.

    pip install -e ".[demo,deepinv]" && python examples/deblurring.py --picture deblurring.png

Any linear physics of deepinv takes the place of `Blur`: `Inpainting`, `MRI`, `Downsampling`, `Tomography`, … A network
that has seen no other picture is trained to explain the blurred one; where it could be otherwise, its standard
deviation is large. `examples/tomography.py` has more on what to make of the numbers.
"""

import argparse
from pathlib import Path

import torch
from deepinv.physics import Blur, GaussianNoise
from deepinv.physics.functional.blur import gaussian_blur
from scipy.stats import spearmanr
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

from laplace_sampling import Gaussian, LinearisedLaplace


class UNet(nn.Module):
    """Two scales and a skip."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def block(before: int, stride: int = 1) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(before, width, 3, stride, padding=1), nn.GroupNorm(4, width), nn.LeakyReLU(0.2)
            )

        self.first, self.coarse, self.up = block(1), nn.Sequential(block(width, 2), block(width)), block(2 * width)
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, z: Tensor) -> Tensor:
        fine = self.first(z)
        coarse = nn.functional.interpolate(self.coarse(fine), size=fine.shape[-2:], mode="bilinear")
        return self.last(self.up(torch.cat([fine, coarse], 1))).sigmoid()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--blur", type=float, default=1.5, help="standard deviation in pixels")
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    side = options.side
    grey = torch.tensor(load_sample_image("flower.jpg")).float().mean(-1)[None, None, :384, 128:512] / 255
    truth = nn.functional.interpolate(grey, size=(side, side), mode="area")

    physics = Blur(gaussian_blur(sigma=(options.blur, options.blur)), padding="circular")
    physics.noise_model = GaussianNoise(options.noise)
    y = physics(truth)  # blurred, with noise

    net = UNet()
    optimiser = torch.optim.Adam(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, options.steps)
    for _ in range(options.steps):
        optimiser.zero_grad()
        image = net(y)
        variation = image.diff(dim=-1).abs().sum() + image.diff(dim=-2).abs().sum()
        loss = (physics.A(image) - y).square().sum() / (2 * options.noise**2) + variation
        loss.backward()
        optimiser.step()
        schedule.step()

    la = LinearisedLaplace(
        net.eval(), Gaussian(1 / options.noise**2, observe=physics), prior="g-prior", num_samples=256
    )
    la.fit_hyperparameters([(y, y)], progress=False)
    pred = la.predict(y)
    print(la)

    error = (pred.mean - truth).abs()
    print(f"root mean square error {float(error.square().mean().sqrt()):.3f}, of the blurred picture", end=" ")
    print(f"{float((y - truth).square().mean().sqrt()):.3f}")
    print(f"90% intervals hold {float((error <= 1.645 * pred.stddev).float().mean()):.0%} of the pixels")
    print(f"rank correlation of error and standard deviation {spearmanr(pred.stddev.ravel(), error.ravel())[0]:.2f}")
    if options.picture:
        draw(options.picture, {"truth": truth, "blurred": y, "reconstruction": pred.mean}, error, pred.stddev)


def draw(path: Path, pictures: dict[str, Tensor], error: Tensor, stddev: Tensor) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(1, 5, figsize=(14, 2.9), layout="constrained")
    for axis, (title, values) in zip(axes, pictures.items(), strict=False):
        axis.imshow(values[0, 0].numpy(), cmap="gray", vmin=0, vmax=1)
        axis.set(title=title, xticks=[], yticks=[])
    most = float(error.quantile(0.995))
    for axis, (title, values) in zip(axes[3:], {"error": error, "standard deviation": stddev}.items(), strict=True):
        drawn = axis.imshow(values[0, 0].numpy(), vmin=0, vmax=most)
        axis.set(title=title, xticks=[], yticks=[])
    plt.colorbar(drawn, ax=axes[4], shrink=0.8)
    plt.savefig(path, dpi=100)
    plt.close()


if __name__ == "__main__":
    main()
