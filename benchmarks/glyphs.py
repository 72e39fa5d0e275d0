"""Distorted letters and digits in the fonts that come with matplotlib: 62 classes, as many images as wanted.

Nothing is downloaded. `glyphs` makes the images, `lenet` and `small_cnn` are networks without normalisation layers, of
about 30,000 and 15,000 weights, and `train` trains one.
`python -m benchmarks.glyphs solvers` and `python -m benchmarks.glyphs samples` print the comparisons of
`benchmarks/large.py`. Case is told by height on a common baseline, and some classes
are alike (0, O and o; 1, I and l), so that no network is certain everywhere.
"""

import argparse
import math
import string
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace_sampling.__main__ import Data

CHARACTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
# Text fonts only: those for symbols and mathematics lack some of the characters or draw others in their place.
FONTS = tuple(
    f"{family}{variant}.ttf"
    for family, variants in {
        "DejaVuSans": ("", "-Bold", "-Oblique", "-BoldOblique"),
        "DejaVuSansMono": ("", "-Bold", "-Oblique", "-BoldOblique"),
        "DejaVuSerif": ("", "-Bold", "-Italic", "-BoldItalic"),
        "STIXGeneral": ("", "Bol", "Italic", "BolIta"),
        "cm": ("r10", "b10", "ss10", "ti10", "tt10"),
    }.items()
    for variant in variants
)
SYMBOL_FONTS = tuple(name for name in FONTS if name.startswith(("DejaVu", "STIX")))
# Part of what a seed means: images are made so many at a time.
_CHUNK = 5000


@lru_cache(maxsize=4)
def masters(side: int = 60, characters: str = CHARACTERS, fonts: tuple[str, ...] = FONTS) -> Tensor:
    """Each character in each font, once, at a high resolution: ink in [0, 1], `[fonts, characters, side, side]`.

    All on one baseline and centred horizontally, so that upper and lower case keep their relative sizes.
    """
    import matplotlib as mpl
    import numpy as np
    from matplotlib.ft2font import FT2Font
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    drawn = []
    for name in fonts:
        missing = {c for c in characters if ord(c) not in FT2Font(str(folder / name)).get_charmap()}
        if missing:
            raise ValueError(f"{name} lacks {sorted(missing)}.")
        font = ImageFont.truetype(str(folder / name), round(0.8 * side))
        for character in characters:
            image = Image.new("L", (side, side))
            ImageDraw.Draw(image).text((side / 2, 0.75 * side), character, fill=255, font=font, anchor="ms")
            drawn.append(torch.from_numpy(np.array(image, dtype=np.float32)) / 255)
    return torch.stack(drawn).reshape(len(fonts), len(characters), side, side)


def _between(low: float, high: float, num: int, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(num, generator=generator)


def _distort(ink: Tensor, side: int, noise: float, generator: torch.Generator) -> Tensor:
    """Images `[n, 1, side, side]` of masters `[n, side', side']`: an affine map, weight, contrast, noise."""
    num = len(ink)
    angle, shear = _between(-0.35, 0.35, num, generator), _between(-0.3, 0.3, num, generator)
    width, height = (_between(0.85, 1.2, num, generator).reciprocal() for _ in range(2))
    shift = [_between(-0.15, 0.15, num, generator) for _ in range(2)]
    cos, sin = angle.cos(), angle.sin()
    rows = [
        torch.stack([width * cos, width * (shear * cos - sin), shift[0]], 1),
        torch.stack([height * sin, height * (shear * sin + cos), shift[1]], 1),
    ]
    # PosteriorSamples at twice the resolution and averaged: bilinear interpolation alone would alias.
    grid = F.affine_grid(torch.stack(rows, 1), [num, 1, 2 * side, 2 * side], align_corners=False)
    x = F.avg_pool2d(F.grid_sample(ink[:, None], grid, align_corners=False), 2)
    weight, contrast, paper = (
        _between(low, high, num, generator)[:, None, None, None] for low, high in ((0.6, 1.7), (0.4, 1.0), (0.0, 0.3))
    )
    x = paper + contrast * x.clamp(0, 1) ** weight
    return x + noise * torch.randn(x.shape, generator=generator)


def images(
    characters: str, num: int, side: int, noise: float, generator: torch.Generator, fonts: tuple[str, ...] = FONTS
) -> tuple[Tensor, Tensor]:
    """Distorted characters `[num, 1, side, side]`, not standardised, and their positions in the string."""
    ink, made, labels = masters(3 * side, characters, fonts), [], []
    for chunk in torch.arange(num).split(_CHUNK):
        label = torch.randint(len(characters), (len(chunk),), generator=generator)
        font = torch.randint(len(fonts), (len(chunk),), generator=generator)
        made.append(_distort(ink[font, label], side, noise, generator))
        labels.append(label)
    return torch.cat(made), torch.cat(labels)


def glyphs(num_train: int = 60_000, num_test: int = 10_000, side: int = 20, noise: float = 0.1, seed: int = 0) -> Data:
    """Images `[N, 1, side, side]` and labels, standardised on the training set; the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    parts = [images(CHARACTERS, num, side, noise, generator) for num in (num_train, num_test)]
    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    x = (x - x[:num_train].mean()) / x[:num_train].std()
    return Data(x[:num_train], y[:num_train], x[num_train:], y[num_train:])


def lenet(classes: int = 62, side: int = 20) -> nn.Sequential:
    """Two convolutions and two linear layers, about 30,000 weights for 62 classes and 20×20 images."""
    left = ((side - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(1, 12, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(12, 24, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(24 * left**2, 140), nn.ReLU(), nn.Linear(140, classes),
    )  # fmt: skip


def small_cnn(classes: int = 62, side: int = 20) -> nn.Sequential:
    """Three convolutions and a linear layer, about 15,000 weights for 62 classes and 20×20 images."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(24 * (side // 8) ** 2, classes),
    )  # fmt: skip


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        right = sum(int((model(a).argmax(-1) == b).sum()) for a, b in zip(x.split(1000), y.split(1000), strict=True))
    return right / len(y)


def train(make: Callable[[], nn.Module], data: Data, epochs: int = 5, batch_size: int = 100) -> nn.Module:
    """A network trained by Adam from a fixed seed, on the device of the data; prints size, test accuracy and time.

    Unlike the demo's training the step size goes up and down again, which a few epochs on many data ask for.
    """
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().to(data.x.device)
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
    steps = epochs * math.ceil(len(data.y) / batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 6e-3, total_steps=steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(data.y), generator=generator).split(batch_size):
            optimiser.zero_grad()
            F.cross_entropy(model(data.x[batch]), data.y[batch]).backward()
            optimiser.step()
            schedule.step()
    model.eval()
    num_weights = sum(p.numel() for p in model.parameters())
    score, seconds = accuracy(model, data.x_test, data.y_test), time.perf_counter() - start
    print(f"{num_weights} weights, {epochs} epochs: test accuracy {score:.1%}, {seconds:.0f} s", flush=True)
    return model


def main(arguments: list[str] | None = None) -> None:
    from benchmarks import large
    from benchmarks.stored import StoredFeatures
    from laplace_sampling.linear_model.features import DenseFeatures

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("comparison", choices=("solvers", "samples"))
    parser.add_argument("--num-train", type=int, help="data to train on; by default 60,000")
    parser.add_argument("--num-data", type=int, help="data of the posterior, of those; by default all, 200 for samples")
    parser.add_argument(
        "--alpha", type=float, help="prior precision; by default 1 of the g-prior, 0.1 of the isotropic"
    )
    parser.add_argument("--rows", type=int, help="that the solvers solve (4), or contour quadrature draws (2)")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3, help="of the samples that are tested")
    parser.add_argument("--epochs", type=int, default=5, help="of training")
    parser.add_argument("--sgd-epochs", type=int, nargs="*", default=[10, 40])
    options = parser.parse_args(arguments)
    torch.set_flush_denormal(True)  # the curvature at certain data is so small that products would slow down
    data = glyphs(options.num_train or 60_000)
    few = options.comparison == "samples"
    model = train(small_cnn if few else lenet, data, options.epochs)
    num = options.num_data or (200 if few else len(data.y))
    data = Data(data.x[:num], data.y[:num], data.x_test, data.y_test)
    if few:
        assert isinstance(model, nn.Sequential)
        stored = StoredFeatures(model, data.x)
        features, alpha = DenseFeatures.of(stored, torch.float32), options.alpha or 0.1
        large.samples(features, stored.outputs_of_network, options.samples, alpha, options.rows or 2, options.seeds)
    else:
        large.solvers(model, data, options.alpha or 1.0, options.rows or 4, tuple(options.sgd_epochs))


if __name__ == "__main__":
    main()
