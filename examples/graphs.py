"""Error bars of graph networks, for nodes of one graph and for whole graphs: `python examples/graphs.py`.

It needs PyTorch Geometric. Nodes of one graph are told apart in three classes; their links and neighbours are a part of
the network. Then the number of links of a graph is predicted, for graphs that are padded to the same number of nodes.
"""

import torch
from torch import Tensor, nn
from torch_geometric.nn import DenseGCNConv, GCNConv

from laplace_sampling import LinearisedLaplace


# --8<-- [start:nodes]
class Nodes(nn.Module):
    """The outputs of some nodes of a graph: `[n]` indices to `[n, 3]`."""

    x: Tensor
    edge_index: Tensor

    def __init__(self, x: Tensor, edge_index: Tensor) -> None:
        super().__init__()
        self.register_buffer("x", x, persistent=False)  # [nodes, features]
        self.register_buffer("edge_index", edge_index, persistent=False)  # [2, edges]
        self.first, self.second, self.head = GCNConv(x.shape[1], 16), GCNConv(16, 16), nn.Linear(16, 3)

    def forward(self, nodes: Tensor) -> Tensor:
        h = self.first(self.x, self.edge_index).relu()
        return self.head(self.second(h, self.edge_index).relu()[nodes])


# --8<-- [end:nodes]


class Graphs(nn.Module):
    """An output for each graph: `x`, `[n, nodes, features]`, `adj`, `[n, nodes, nodes]`, `mask`, `[n, nodes]`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = DenseGCNConv(3, 8), DenseGCNConv(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, adj: Tensor, mask: Tensor) -> Tensor:
        h = self.first(x, adj, mask).relu()
        h = self.second(h, adj, mask).relu()
        return self.head(h.sum(1) / mask.sum(1, keepdim=True))


# Nodes of a class have links to each other more often than to others.
generator = torch.Generator().manual_seed(0)
labels = torch.arange(90) % 3
chance = torch.where(labels[:, None] == labels, 0.15, 0.02)
edge_index = (torch.rand(90, 90, generator=generator) < chance).nonzero().T
x = nn.functional.one_hot(labels, 3) + 1.5 * torch.randn(90, 3, generator=generator)
train, test = torch.arange(90).split([45, 45])

torch.manual_seed(0)
of_nodes = Nodes(x, edge_index)
optimiser = torch.optim.Adam(of_nodes.parameters(), lr=0.01, weight_decay=5e-4)
for _ in range(100):
    optimiser.zero_grad()
    nn.functional.cross_entropy(of_nodes(train), labels[train]).backward()
    optimiser.step()

nodes = LinearisedLaplace(of_nodes, "classification", method="exact")
nodes.fit_hyperparameters([(train, labels[train])], progress=False)  # all nodes in one batch
pred = nodes.predict(test)  # probabilities pred.probs, [45, 3]

# Graphs of three to seven nodes.
sizes = torch.randint(3, 8, (40,), generator=generator)
mask = (torch.arange(7) < sizes[:, None]).float()
adj = (torch.rand(40, 7, 7, generator=generator) < 0.4).float() * mask[:, None] * mask[:, :, None]
adj, features = (adj + adj.mT).clamp(max=1), torch.randn(40, 7, 3, generator=generator) * mask[:, :, None]
targets = adj.sum((1, 2))[:, None] / 10

of_graphs = Graphs()
optimiser = torch.optim.Adam(of_graphs.parameters(), lr=0.01, weight_decay=1e-3)
for _ in range(200):
    optimiser.zero_grad()
    nn.functional.mse_loss(of_graphs(features, adj, mask), targets).backward()
    optimiser.step()

graphs = LinearisedLaplace(of_graphs, "regression")
graphs.fit_hyperparameters([((features, adj, mask), targets)], progress=False)

if __name__ == "__main__":
    print("accuracy of nodes", (pred.probs.argmax(1) == labels[test]).float().mean().item())
    print("error bars of graphs", graphs.predict((features[:4], adj[:4], mask[:4])).stddev[:, 0].tolist())
