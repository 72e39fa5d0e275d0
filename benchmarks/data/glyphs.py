"""Distorted letters in the fonts that come with matplotlib, drawn here: inputs that are no digits."""

from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

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
# Images are drawn in chunks of this size. Another size would change the images of a seed.
_CHUNK = 5000


@lru_cache(maxsize=4)
def masters(side: int, characters: str, fonts: tuple[str, ...]) -> Tensor:
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
    # Drawn at twice the resolution and averaged: bilinear interpolation alone would alias.
    grid = F.affine_grid(torch.stack(rows, 1), [num, 1, 2 * side, 2 * side], align_corners=False)
    x = F.avg_pool2d(F.grid_sample(ink[:, None], grid, align_corners=False), 2)
    weight, contrast, paper = (
        _between(low, high, num, generator)[:, None, None, None] for low, high in ((0.6, 1.7), (0.4, 1.0), (0.0, 0.3))
    )
    x = paper + contrast * x.clamp(0, 1) ** weight
    return x + noise * torch.randn(x.shape, generator=generator)


def images(
    characters: str, num: int, side: int, noise: float, generator: torch.Generator, fonts: tuple[str, ...] = FONTS
) -> Tensor:
    """Distorted characters `[num, 1, side, side]`, not standardised."""
    ink, made = masters(3 * side, characters, fonts), []
    for chunk in torch.arange(num).split(_CHUNK):
        label = torch.randint(len(characters), (len(chunk),), generator=generator)
        font = torch.randint(len(fonts), (len(chunk),), generator=generator)
        made.append(_distort(ink[font, label], side, noise, generator))
    return torch.cat(made)
