"""Networks and posteriors for the tests of exports."""

from typing import Any

import torch
from flat_settings import scaled
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import LinearisedLaplace

BATCH = ({0: torch.export.Dim.DYNAMIC},)


class TinyViT(nn.Module):
    """Patches, a class token, positions and one block of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, 4)
        self.token, self.positions = (nn.Parameter(torch.randn(1, n, 8)) for n in (1, 10))
        self.block = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], 1) + self.positions
        return self.head(self.block(tokens)[:, 0])


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """By name, with the shape of a datum; three outputs."""
    norm = nn.BatchNorm2d(4)
    norm.running_mean, norm.running_var = torch.randn(4), torch.rand(4) + 0.5
    return {
        "mlp": (nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), (5,)),
        "cnn": (
            nn.Sequential(
                *(nn.Conv2d(1, 4, 3, bias=False), norm, nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, groups=2)),
                *(nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
            ),
            (1, 12, 12),
        ),
        "lenet": (
            nn.Sequential(
                *(nn.Conv2d(1, 3, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(3, 6, 3), nn.Sigmoid()),
                *(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(24, 8), nn.SiLU(), nn.Linear(8, 3)),
            ),
            (1, 12, 12),
        ),
        "vit": (TinyViT(), (1, 12, 12)),
    }


def fitted(
    name: str, likelihood: str = "classification", dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[LinearisedLaplace, Tensor]:
    """A posterior and new inputs; it is scaled, so that the scale is seen."""
    torch.manual_seed(0)
    model, shape = networks()[name]
    x = torch.randn(20, *shape, dtype=dtype)
    y = {
        "classification": torch.randint(3, (20,)),
        "binary": torch.randint(2, (20, 3)).to(dtype),
        "regression": torch.randn(20, 3, dtype=dtype),
        "heteroscedastic": torch.randn(20, 1, dtype=dtype),
        "poisson": torch.randint(5, (20, 3)).to(dtype),
    }[likelihood]
    settings = {"method": "auto" if settings.get("parameters") == "last_layer" else "krylov", **settings}
    la = LinearisedLaplace(model.to(dtype), likelihood, num_samples=6, **settings)
    return scaled(la.fit([(x[:12], y[:12])], tolerance=0.1, progress=False), 1.7), x[12:]


def assert_predicts(found: dict[str, Tensor], la: LinearisedLaplace, x: Tensor, tolerance: float = 1e-5) -> None:
    pred = la.predict(x)
    for name, value in found.items():
        assert_close(value, getattr(pred, name), rtol=tolerance, atol=tolerance)
