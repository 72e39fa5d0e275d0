"""Cost, counted in products and in bytes, not in seconds."""

import warnings
import weakref
from functools import partial

import torch
from cases import make_case
from flat_settings import laplace_of
from grids import covering
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laplace_sampling import SGD, Evidence, LinearisedLaplace
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.linear_model.linear_model import tangent_model_of
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers import svrg


class PeakMemory(TorchDispatchMode):
    """The largest number of bytes that tensors made inside it held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.now, self.peak = set(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.live:
                    self.live.add(key)
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._free, key, size)
        return out

    def _free(self, key: int, size: int) -> None:
        self.live.discard(key)
        self.now -= size


def test_samples_take_k_jvps_and_exact_covariances_a_vjp_of_each_output() -> None:
    case = make_case("classification")
    num, outputs = Linearisation(case.model)(case.x).shape
    la = LinearisedLaplace(case.model, "classification", num_samples=12, method="kfac")
    la.fit([(case.x, case.y)], progress=False)
    la.network.products.update(jvp=0, vjp=0)
    pred = la.predict(case.x)
    assert la.network.products == {"jvp": 0, "vjp": 0}
    assert pred.samples.shape == (12, num, outputs)
    assert la.network.products == {"jvp": 12 * num, "vjp": 0}
    assert la.predict(case.x, num_samples=5).samples.shape == (5, num, outputs)
    assert la.network.products == {"jvp": 17 * num, "vjp": 0}
    assert pred.stddev.shape == pred.probs.shape == (num, outputs)
    assert la.network.products == {"jvp": 17 * num, "vjp": outputs * num}


def test_calls_of_the_model_do_not_grow_with_outputs_or_samples() -> None:
    calls = 0

    class Counted(nn.Linear):
        def forward(self, x):
            nonlocal calls
            calls += 1
            return super().forward(x)

    counts = {}
    for outputs, samples in ((2, 4), (50, 4), (2, 16)):
        la = LinearisedLaplace(Counted(3, outputs), "classification", num_samples=samples, method="exact")
        la.fit([(torch.randn(6, 3), torch.arange(6) % 2)], progress=False)
        calls = 0
        assert la.predict(torch.randn(6, 3)).samples.shape == (samples, 6, outputs)
        counts[outputs, samples] = calls
    assert set(counts.values()) == {2}  # one forward pass, one of forward mode


def _body() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 8),
    )  # fmt: skip


def _peak(run) -> int:
    run()  # warm: caches of the first call do not count
    with PeakMemory() as memory:
        run()
    return memory.peak


def test_peak_memory_of_products_does_not_grow_with_the_number_of_outputs() -> None:
    x = torch.randn(4, 1, 32, 32)
    peaks = {}
    for outputs in (10, 1000):
        network = Linearisation(nn.Sequential(_body(), nn.Linear(8, outputs)))
        v, u = torch.randn(4, network.num_parameters), torch.randn(4, 4, outputs)
        peaks[outputs] = [_peak(lambda n=network, v=v: n.jvp(x, v)), _peak(lambda n=network, u=u: n.vjp(x, u))]
    print("peak bytes of jvp and vjp", peaks)
    for few, many in zip(peaks[10], peaks[1000], strict=True):
        assert many < 1.2 * few


def test_peak_memory_of_predict_does_not_grow_with_the_number_of_outputs() -> None:
    x, peaks = torch.randn(4, 1, 32, 32), {}
    for outputs in (10, 64, 1000):  # draws from exact covariances, and samples
        model = nn.Sequential(_body(), nn.Linear(8, outputs))
        la = LinearisedLaplace(model, "classification", num_samples=64, prior="isotropic", method="exact")
        la.fit([(x[:1], torch.zeros(1).long())], progress=False)
        la._fitted.posterior = type(la._fitted.posterior)(**{**vars(la._fitted.posterior), "rows": 4})
        peaks[outputs] = [_peak(lambda la=la, n=n: getattr(la.predict(x), n)) for n in ("probs", "samples")]
    print("peak bytes of predict", peaks)
    # Rows of 64 outputs are in float64, and are taken in that precision.
    assert peaks[10][0] < peaks[64][0] < 4 * peaks[64][1]
    assert max(of_samples for _, of_samples in peaks.values()) < 1.2 * min(
        of_samples for _, of_samples in peaks.values()
    )


def test_peak_memory_of_products_does_not_grow_with_the_data() -> None:
    model, peaks = _body(), {}
    for num in (4, 16):
        batches = [(torch.randn(1, 1, 32, 32), torch.zeros(1).long()) for _ in range(num)]
        linear = tangent_model_of(Linearisation(model), Categorical(), batches, kind="homogeneous").model
        ggn = linear.ggn(linear.network_outputs)
        v = torch.randn(4, ggn.size)
        peaks[num] = _peak(lambda g=ggn, v=v: g.matmul(v))
    assert peaks[16] < 1.05 * peaks[4]


@covering(method=["krylov", "sgd", "svrg"], prior=["g-prior", "isotropic"], hyperparameters=[False, True])
def test_a_fit_keeps_to_its_memory(method: str, prior: str, hyperparameters: bool, monkeypatch) -> None:
    """The budget, and on top of it what one product takes and a few copies of the weights and of the data."""
    g = torch.Generator().manual_seed(0)
    model, x, y = nn.Linear(3000, 3), torch.randn(4, 3000, generator=g) / 55, torch.arange(4) % 3
    size = sum(p.numel() for p in model.parameters())
    network = Linearisation(model)
    short = partial(SGD, epochs=1, min_steps=5, mode_epochs=1, finish_passes=0, tolerance=0.9)
    monkeypatch.setattr(svrg, "SGD", short)  # with which svrg finds the mode
    solver = short()
    for vectors in (100, 300):
        la = laplace_of(
            model,
            "classification",
            prior=prior,
            prior_precision=0.1,
            method=method,
            num_samples=64,
            max_memory=4 * size * vectors,
            solver=solver if method == "sgd" else None,
        )
        fit = partial(la.fit_hyperparameters, criterion=Evidence(max_steps=2)) if hyperparameters else la.fit
        with warnings.catch_warnings(), PeakMemory() as memory:
            warnings.simplefilter("ignore")
            fit([(x, y)], progress=False)
        product = _peak(lambda: network.vjp(x, torch.ones(1, 4, 3)) + network.jvp(x, torch.ones(1, size)).sum())
        beside = product + 6 * 4 * size + 4 * x.numel() * 4
        print(method, prior, "peak", memory.peak / (4 * size), "vectors of", vectors, "and", beside / (4 * size))
        assert memory.peak <= la.settings.method.max_memory + beside
        assert la.samples_.shape == (64, size)


def test_memory_meter_sees_what_it_should() -> None:
    def run() -> None:
        a = torch.zeros(1000)
        b = a + 1
        del a, b
        torch.zeros(500)

    assert _peak(run) == 8000
