"""`asv run --config benchmarks/asv.conf.json -E existing:python` measures the present commit.

Each class is set up once for each of its parameters; `time_*` are seconds on one thread, `peakmem_*` the most memory of
a process that sets up and runs, in bytes.
"""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.comparison.networks import build
from benchmarks.data.image_sets import made_up
from laplace_sampling import LinearisedLaplace
from laplace_sampling.networks.linearisation import Linearisation

NUM, TEST, BATCH = 500, 200, 100
NETWORKS = ["MLP", "LeNet of 1998", "CNN with batch norm", "ResNet", "ViT"]
SETTINGS: dict[str, dict[str, str]] = {"default": {}, "last layer": {"parameters": "last_layer"}}


class Subject:
    """A network with its first weights, and images that are made up."""

    timeout = 300

    def setup(self, name: str, second: Any) -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        self.data = made_up(NUM, TEST)
        self.network: nn.Module = build(name, self.data.train.x.shape[1:], 10).eval()


class Products(Subject):
    """GGN products of several vectors on one batch."""

    params = (NETWORKS, [1, 8, 64])
    param_names = ("network", "vectors")

    def setup(self, name: str, second: int) -> None:
        super().setup(name, second)
        self.linearised = Linearisation(self.network)
        self.x = self.data.train.x[:BATCH]
        self.v = torch.randn(second, self.linearised.num_parameters, generator=torch.Generator().manual_seed(0))
        self.time_ggn(name, second)  # the first product tries which way works

    def time_ggn(self, name: str, vectors: int) -> None:
        self.linearised.ggn(self.x, self.v, lambda u: u)

    def peakmem_ggn(self, name: str, vectors: int) -> None:
        self.time_ggn(name, vectors)


def fitted(subject: Subject, settings: str) -> LinearisedLaplace:
    la = LinearisedLaplace(subject.network, "classification", **SETTINGS[settings])  # pyright: ignore
    return la.fit_hyperparameters(subject.data.train.loader(BATCH), progress=False)


class Fits(Subject):
    """Fits with their hyperparameters, which take long enough to be measured once."""

    params = (NETWORKS, list(SETTINGS))
    param_names = ("network", "settings")
    number, repeat, warmup_time = 1, 1, 0.0

    def time_fit(self, name: str, settings: str) -> None:
        fitted(self, settings)

    def peakmem_fit(self, name: str, settings: str) -> None:
        fitted(self, settings)


class Predictions(Subject):
    """Predictions of fits, and their files."""

    params = (["LeNet of 1998", "ViT"], list(SETTINGS))
    param_names = ("network", "settings")

    def setup(self, name: str, second: str) -> None:
        super().setup(name, second)
        self.la = fitted(self, second)
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "posterior"
        self.la.save(self.path)

    def teardown(self, name: str, settings: str) -> None:
        self.folder.cleanup()

    def time_one(self, name: str, settings: str) -> None:
        _ = self.la.predict(self.data.test.x[:1]).stddev

    def time_many(self, name: str, settings: str) -> None:
        _ = self.la.predict(self.data.test.x).stddev

    def time_load(self, name: str, settings: str) -> None:
        LinearisedLaplace.load(self.path, self.network)

    def track_file(self, name: str, settings: str) -> int:
        return self.path.stat().st_size
