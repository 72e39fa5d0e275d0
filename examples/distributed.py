"""Error bars of a network that several processes train and fit together, which survives kills.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/distributed.py --folder run [--data DIR]

Trains a small network by `DistributedDataParallel`, fits its posterior by all processes, each of which takes its share
of the data, and predicts. The images are Fashion-MNIST, from `DIR/images/fashion-mnist.npz`, or synthetic ones. When a
process is killed, `torchrun` starts all of them again, and the fit goes on from its file in `--folder`. The variable
keeps `torchrun` from giving them a store with addresses of the killed ones.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from laplace_sampling import ClassificationPrediction, LinearisedLaplace

SIDE, CLASSES = 28, 10


def synthetic(num: int) -> tuple[Tensor, Tensor]:
    """Noisy images `[num, 1, 28, 28]` of ten smooth patterns, and which pattern it is."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(CLASSES, 1, 4, 4, generator=generator)
    patterns = nn.functional.interpolate(coarse, size=SIDE, mode="bilinear")
    y = torch.randint(CLASSES, (num,), generator=generator)
    return patterns[y] + 4.0 * torch.randn(num, 1, SIDE, SIDE, generator=generator), y


def images(folder: Path | None, num: int, num_test: int = 1000) -> tuple[TensorDataset, TensorDataset]:
    """Training and test images."""
    if folder is None:
        x, y = synthetic(num + num_test)
        return TensorDataset(x[:num], y[:num]), TensorDataset(x[num:], y[num:])
    sets = []
    with np.load(folder / "images" / "fashion-mnist.npz") as data:
        for part, size in (("train", num), ("test", num_test)):
            x = torch.tensor(data[f"x_{part}"][:size]).reshape(-1, 1, SIDE, SIDE) / 255
            sets.append(TensorDataset((x - 0.286) / 0.353, torch.tensor(data[f"y_{part}"][:size]).long().flatten()))
    return sets[0], sets[1]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, stride=2), nn.Tanh(), nn.Conv2d(8, 16, 5, stride=2), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(256, CLASSES)),
    )


def train(model: DistributedDataParallel, data: TensorDataset, epochs: int) -> None:
    """Each process takes its share of each epoch."""
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the trained weights and of the unfinished fit")
    parser.add_argument("--data", type=Path, help="a folder with `images/fashion-mnist.npz`")
    parser.add_argument("--images", type=int, default=4000, help="of the training images")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    data, test = images(options.data, options.images)
    weights, checkpoint = options.folder / "weights.pt", options.folder / "fit.checkpoint"

    model = network()
    if weights.exists():  # after a restart
        model.load_state_dict(torch.load(weights, weights_only=True))
        if first and checkpoint.exists():
            print(f"goes on with the fit of {checkpoint}")
    dist.barrier()  # all have looked for the file
    # --8<-- [start:example]
    ddp = DistributedDataParallel(model)
    if not weights.exists():
        train(ddp, data, options.epochs)
        if first:
            torch.save(model.state_dict(), f"{weights}.part")
            Path(f"{weights}.part").replace(weights)  # no half of a file, whenever a process is killed

    # All processes make the same calls, with the same loader of all data.
    la = LinearisedLaplace(ddp, "classification", num_samples=32, process_group=dist.group.WORLD)
    la.fit_hyperparameters(DataLoader(data, batch_size=100), progress=first, checkpoint=checkpoint)
    x, y = test.tensors
    pred = la.predict(x)
    assert isinstance(pred, ClassificationPrediction)
    if first:
        print(la)
        # --8<-- [end:example]
        plain = ddp.module(x).log_softmax(1).gather(1, y[:, None]).mean()
        print(f"accuracy on {len(y)} test images: {pred.probs.argmax(1).eq(y).float().mean():.1%}")
        print(f"log-likelihood of a label: {pred.log_prob(y).mean():.3f}, of the network alone {plain:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
