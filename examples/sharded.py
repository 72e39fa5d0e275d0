"""Error bars of a classifier that `fully_shard` has shared out: `torchrun --nproc-per-node 2 examples/sharded.py`."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import LinearisedLaplace


class Classifier(nn.Module):
    """Of sequences of numbers from 0 to 49."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        layers = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(16, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


if not dist.is_initialized():
    dist.init_process_group("gloo")
# The same weights and data in each process.
torch.manual_seed(0)
model = Classifier()
ids = torch.randint(50, (64, 8))
labels, ids_new = ids[:, 0] % 3, torch.randint(50, (4, 8))
path = Path(tempfile.mkdtemp()) / "posterior.pt"

# --8<-- [start:example]
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
for _ in range(10):
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(ids), labels).backward()
    optimiser.step()

# Each process makes all of these calls, with the same data.
loader = DataLoader(TensorDataset(ids, labels), batch_size=32)
la = LinearisedLaplace(model, "classification", parameters="last_layer")  # or "*lora*", or other weights
print(la.plan(loader))
la.fit_hyperparameters(loader, progress=False)
pred = la.predict(ids_new)
state = la.state_dict()
if dist.get_rank() == 0:
    torch.save(state, path)  # the file that `la.save(path)` writes
# --8<-- [end:example]
