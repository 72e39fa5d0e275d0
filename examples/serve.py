"""A server of predictions with error bars, by LitServe: `python examples/serve.py [port]`.

The first start trains a small network, fits its posterior and writes both as one exported program, `error_bars.pt2`.
The server reads that file alone. Ask it with

    curl localhost:8000/predict -H "Content-Type: application/json" -d '{"x": [[0.5, -1.0]]}'
"""

import sys
from pathlib import Path
from typing import Any

import litserve
import torch
from torch import Tensor, nn

from laplace_sampling import LinearisedLaplace

PATH = Path("error_bars.pt2")


def make(path: Path) -> None:
    """Train, fit and export: three classes of points in the plane."""
    torch.manual_seed(0)
    x = torch.randn(120, 2)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    la = LinearisedLaplace(model, "classification", parameters="last_layer")
    la.fit_hyperparameters([(x, y)], progress=False)
    module = la.to_module(outputs=("probs", "stddev", "epistemic"))
    # The first axis, of the batch, may have any length.
    program = torch.export.export(module, (x[:2],), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    torch.export.save(program, path)


class ErrorBars(litserve.LitAPI):
    """One posterior. It needs torch, and neither this library nor the training data."""

    def setup(self, device: str) -> None:
        self.module = torch.export.load(PATH).module()

    def decode_request(self, request: dict[str, Any], **kwargs: Any) -> Tensor:
        return torch.tensor(request["x"], dtype=torch.float32)

    def predict(self, x: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        with torch.no_grad():
            return self.module(x)

    def encode_response(self, output: dict[str, Tensor], **kwargs: Any) -> dict[str, Any]:
        return {name: value.tolist() for name, value in output.items()}


if __name__ == "__main__":
    if not PATH.exists():
        make(PATH)
    server = litserve.LitServer(ErrorBars(), accelerator="cpu")
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    server.run(host="127.0.0.1", port=port, generate_client_file=False, num_api_servers=1)
