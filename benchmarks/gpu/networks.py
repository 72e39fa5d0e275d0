"""The networks for grey images of 28 × 28, small ones for quick runs, and their training on the device."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.comparison import networks
from benchmarks.data.tasks import Part

BATCH, STEP_SIZE = 256, 2e-3


def lenet(first: int = 32, second: int = 64, hidden: int = 128) -> nn.Module:
    """421,642 weights."""
    return nn.Sequential(
        nn.Conv2d(1, first, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(49 * second, hidden), nn.ReLU(), nn.Linear(hidden, 10),
    )  # fmt: skip


class ViT(nn.Module):
    """A vision transformer on 49 patches of 4 × 4: four layers of width 192, 1.8 million weights."""

    def __init__(self, width: int = 192, layers: int = 4, heads: int = 3) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, 4, stride=4)
        self.position = nn.Parameter(0.02 * torch.randn(49, width))
        self.layers = nn.Sequential(*(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        ))  # fmt: skip
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.embed(x).flatten(2).mT + self.position
        return self.head(self.norm(self.layers(patches)).mean(1))


def resnet18() -> nn.Module:
    """11.2 million weights."""
    import torchvision

    net = torchvision.models.resnet18(num_classes=10)
    net.conv1, net.maxpool = nn.Conv2d(1, 64, 3, 1, 1, bias=False), nn.Identity()  # pyright: ignore
    return net


# Each with a small one for quick runs, and the epochs of its training.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], int]] = {
    "LeNet": (lenet, partial(lenet, 2, 3, 8), 4),
    "ViT": (ViT, partial(ViT, 4, 1, 1), 4),
    "ResNet-18": (resnet18, partial(networks.resnet, torch.Size([1, 28, 28]), 10, 0.0, 1), 2),
}


def made(build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """A network before training, in evaluation mode."""
    torch.manual_seed(0)
    return build().eval().to(device)


def num_weights(network: nn.Module) -> str:
    return f"{sum(p.numel() for p in network.parameters()):,}"


def trained(network: nn.Module, part: Part, epochs: int) -> None:
    """Trains by AdamW with all data on the device of the network, in bfloat16 if that is a GPU."""
    device = next(network.parameters()).device
    x, y = part.x.to(device), part.y.to(device)
    optimiser = torch.optim.AdamW(network.parameters())
    total = epochs * -(-len(y) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, STEP_SIZE, total_steps=total)
    network.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(y), device=device).split(BATCH):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
                loss = F.cross_entropy(network(x[rows]), y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    network.eval()
