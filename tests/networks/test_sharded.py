"""Models whose weights processes share out: products, fits and files are those of the plain model, on each rank."""

import copy
import io
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from distributed_processes import run_on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from laplace_sampling import LinearisedLaplace
from laplace_sampling.networks import sharded
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.random_weights import linearise

# Processes are started one group after the other.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

WIDTH, NUM_DATA = 6, 9
CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-10}


class Adapted(nn.Module):
    """A frozen linear layer with a trained update of rank 2, as LoRA has it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(2, WIDTH))
        self.lora_b = nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.lora_a.T @ self.lora_b.T


class Network(nn.Module):
    """Blocks between two layers that are in no block."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, WIDTH)
        blocks = [[Adapted(nn.Linear(WIDTH, WIDTH)), nn.LayerNorm(WIDTH), nn.Tanh()] for _ in range(num_blocks)]
        self.blocks, self.last = nn.ModuleList(nn.Sequential(*block) for block in blocks), nn.Linear(WIDTH, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Checkpointed(Network):
    """Of which the backward pass runs blocks again."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)


def _sharded(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def _data() -> tuple[Tensor, Tensor]:
    return _random(NUM_DATA, 3), _random(NUM_DATA, 2)


def _products(network: Linearisation) -> dict[str, Callable[[], Tensor]]:
    x, v, u = _data()[0], _random(3, network.num_parameters), _random(3, NUM_DATA, 2)
    return {
        "outputs": lambda: network(x),
        "jvp": lambda: network.jvp(x, v),
        "jvp of one": lambda: network.jvp(x, v[:1]),
        "vjp": lambda: network.vjp(x, u),
        "ggn": lambda: network.ggn(x, v, lambda u: 2 * u),
        "ggn of one": lambda: network.ggn(x, v[:1], lambda u: 2 * u),
        "in float64": lambda: network.in_float64().vjp(x, u),
        "vjp_each": lambda: network.vjp_each(x, u[0]),
        "jacobian": lambda: network.jacobian(x),
        "derivative in inputs": lambda: _derivative(network, x, v),
    }


def _derivative(network: Linearisation, x: Tensor, v: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(network.jvp(x, v, graph=True).sin().sum(), x)[0]


def _assert_same(model: Any, plain: nn.Module) -> None:
    """The full parameters of a sharded model are those of a plain one."""
    for (name, p), (other, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(p.full_tensor(), q.detach(), **CLOSE)


def _train(model: nn.Module, x: Tensor) -> None:
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.1)
    model(x).square().mean().backward()
    optimiser.step()


# Products -------------------------------------------------------------------------------------------------------------


def _check_products(plain: nn.Module, model: nn.Module, parameters: Any) -> None:
    own, other = linearise(plain, parameters), linearise(model, parameters)
    assert other.names == own.names
    torch.testing.assert_close(other.weights, own.weights, **CLOSE)
    assert torch.equal(other.fingerprint(), own.fingerprint())
    for (name, expected), product in zip(_products(own).items(), _products(other).values(), strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no product falls back to another way
            torch.testing.assert_close(product(), expected(), **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def _state(model: nn.Module) -> list[Any]:
    """The parameters and the hooks of a model, as objects."""
    hooks = [
        hook for part in model.modules() for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
    ]
    return [*model.parameters(), *hooks]


def _compares_products(parameters: Any) -> None:
    plain, model = Network(), _sharded(Network())
    before = _state(model)
    _check_products(plain, model, parameters)
    # All is put back, and training goes on.
    assert all(now is then for now, then in zip(_state(model), before, strict=True))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    _assert_same(model, plain)
    _train(model, _data()[0])
    _train(plain, _data()[0])
    _assert_same(model, plain)
    _check_products(plain, model, parameters)


@pytest.mark.parametrize("parameters", [None, "*lora*", "last_layer", ["first.weight", "blocks.1.1.bias"]])
def test_products_are_those_of_the_plain_model(parameters) -> None:
    run_on_ranks(_compares_products, 2, parameters)


def _compares_layouts() -> None:
    def check(shard: Callable[[Any], Any], parameters: Any = "*lora*") -> None:
        plain, model = Network(), Network()
        shard(model)
        _check_products(plain, model, parameters)

    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    check(lambda model: _sharded(model, mesh=replicas))
    check(lambda model: _sharded(model, shard_placement_fn=lambda p: Shard(int(p.shape[-1] % 2 == 0) * (p.dim() - 1))))
    check(fully_shard, parameters=None)  # one block
    # The rest is plain.
    check(lambda model: [fully_shard(block) for block in model.blocks], parameters={"last.weight": [1, 5, 7]})
    check(lambda model: fully_shard([model.first, model.last]))  # one block of two parts
    # FSDP leaves the parameters of the outermost module whole after a forward pass without a backward one.
    check(lambda model: _sharded(model)(_data()[0]), parameters=["first.*", "blocks.0.1.*"])


def test_other_layouts() -> None:
    run_on_ranks(_compares_layouts, 2)


def _compares_checkpoints() -> None:
    for parameters in (None, "*lora*"):
        own, other = linearise(Network(), parameters), linearise(_sharded(Checkpointed()), parameters)
        for name in ("vjp", "ggn of one", "jvp"):
            torch.testing.assert_close(_products(other)[name](), _products(own)[name](), **CLOSE)


def test_checkpoints_gather_again() -> None:
    run_on_ranks(_compares_checkpoints, 2)


class _Gathered:
    """The bytes of gathered tensors that are alive, and the most that were."""

    def __init__(self) -> None:
        self.all, self.most, self._whole = list[tuple[StorageWeakRef, int]](), 0, sharded.whole

    def whole(self, tensor: Any, *args: Any) -> Tensor:
        gathered = self._whole(tensor, *args)
        if isinstance(tensor, DTensor):
            self.all.append((StorageWeakRef(gathered.untyped_storage()), gathered.numel() * gathered.element_size()))
            self.most = max(self.most, self.alive)
        return gathered

    @property
    def alive(self) -> int:
        return sum(size for storage, size in self.all if not storage.expired())


def _measures_memory() -> None:
    plain = {name: 8 * p.numel() for name, p in Network(5).named_parameters()}
    # A thread of gloo may hold what it has just gathered a moment longer.
    late = 2 * max(plain.values())
    for parameters in ("*lora*", "first.*"):
        network = Linearisation(_sharded(Network(5)), parameters)
        assert network.shell.mesh is not None
        frozen = {name: size for name, size in plain.items() if name not in network.names}
        block = sum(size for name, size in frozen.items() if name.startswith("blocks.0."))
        around = sum(size for name, size in frozen.items() if not name.startswith("blocks."))
        products, small = _products(network), 8 * network.num_parameters + around + block + late
        assert small < sum(plain.values())  # else this shows nothing
        for name in ("outputs", "jvp"):
            assert _most_gathered(products[name], late) <= small, name


def _most_gathered(product: Callable[[], Tensor], late: int) -> int:
    gathered = _Gathered()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "whole", gathered.whole)
        product()
    assert gathered.alive <= late
    return gathered.most


def test_frozen_weights_are_whole_a_block_at_a_time() -> None:
    run_on_ranks(_measures_memory, 2)


# Fits -----------------------------------------------------------------------------------------------------------------


def _fitted(model: nn.Module, parameters: Any, method: str) -> LinearisedLaplace:
    la = LinearisedLaplace(model, "regression", parameters=parameters, method=method, num_samples=4)
    la.fit_hyperparameters([_data()], progress=False)
    return la


def _moments(la: LinearisedLaplace) -> list[Tensor]:
    prediction: Any = la.predict(_data()[0])
    return [prediction.mean, prediction.variance]


def _compares_fits(method: str, parameters: Any) -> None:
    x, _ = _data()
    own, model = _fitted(Network(), parameters, method), _sharded(Network())
    la = _fitted(model, parameters, method)
    for found, value in zip(tree_leaves(la.state_dict()), tree_leaves(own.state_dict()), strict=True):
        if isinstance(value, Tensor) and value.is_floating_point():
            torch.testing.assert_close(found, value, **CLOSE)
    expected = _moments(own)
    for found in (la, _loaded(la, Network()), _loaded(own, model)):
        torch.testing.assert_close(_moments(found), expected, **CLOSE)
    _train(model, x)
    if parameters is None:
        torch.testing.assert_close(_moments(la), expected, **CLOSE)
    else:  # weights that the fit shares have changed
        with pytest.raises(ValueError, match="in place"):
            la.predict(x)


def _loaded(la: LinearisedLaplace, model: nn.Module) -> LinearisedLaplace:
    file = io.BytesIO()
    la.save(file)
    file.seek(0)
    return LinearisedLaplace.load(file, model)


@pytest.mark.parametrize(
    ("method", "parameters"), [("exact", "last_layer"), ("krylov", "*lora*"), ("kfac", None), ("auto", "*lora*")]
)
def test_fits_are_those_of_the_plain_model(method, parameters) -> None:
    run_on_ranks(_compares_fits, 2, method, parameters)


def _has_other_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    model[1].running_mean.fill_(dist.get_rank())  # pyright: ignore
    la = LinearisedLaplace(cast(nn.Module, fully_shard(model)), "regression")
    with pytest.raises(ValueError, match="buffers"):
        la.fit_hyperparameters([(torch.randn(5, 3), torch.randn(5, 4))], progress=False)


def test_other_buffers_are_refused() -> None:
    run_on_ranks(_has_other_buffers, 2)


# Other models ---------------------------------------------------------------------------------------------------------


def _takes_data_parallel() -> None:
    plain, model, (x, _) = Network(), Network(), _data()
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def fail(*args: Any) -> None:
        raise AssertionError("DistributedDataParallel has run")

    hook = wrapped.register_forward_pre_hook(fail)
    la, own = _fitted(wrapped, "*lora*", "krylov"), _fitted(plain, "*lora*", "krylov")
    assert la.network.source is model
    torch.testing.assert_close(_moments(la), _moments(own), rtol=0, atol=0)
    hook.remove()
    _train(wrapped, x)
    _train(plain, x)
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), **CLOSE)


def test_distributed_data_parallel() -> None:
    run_on_ranks(_takes_data_parallel, 2)


def _refuses() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    parallel = parallelize_module(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), mesh["tensor"], {"0": ColwiseParallel()})
    both: Any = copy.deepcopy(parallel)
    for model in (parallel, fully_shard(both, mesh=mesh["data"])):
        with pytest.raises(TypeError, match="parallelize_module"):
            LinearisedLaplace(model, "regression")
    flat = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match="fully_shard"):
        LinearisedLaplace(nn.Sequential(flat), "regression")
    model = _sharded(Network())
    with pytest.raises(ValueError, match="to_module"):
        _fitted(model, "last_layer", "exact").to_module()


def test_what_is_refused() -> None:
    run_on_ranks(_refuses, 2)


# The example ----------------------------------------------------------------------------------------------------------


def _runs_the_example() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is hardly trained
        found = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "sharded.py"))
    weights = get_model_state_dict(found["model"], options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        plain = found["Classifier"]()
        plain.load_state_dict(weights)
        prediction: Any = LinearisedLaplace.load(found["path"], plain).predict(found["ids_new"])
        torch.testing.assert_close(prediction.probs, found["pred"].probs)


def test_the_example_runs_and_its_file_loads_with_the_plain_model() -> None:
    run_on_ranks(_runs_the_example, 2)
