"""Modules with error bars give what `predict` gives, also exported, as ONNX files and pickled."""

import copy
import io
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import BATCH, assert_predicts, fitted
from flat_settings import scaled
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.testing import assert_close

from laplace_sampling import Categorical, Gaussian, LinearisedLaplace, NotFittedError, save_onnx
from laplace_sampling.export.program import HeadProgram
from laplace_sampling.linear_model.features import features_at

LAST = {"parameters": "last_layer"}
# Every quantity of each kind of prediction.
QUANTITIES = {
    "classification": (
        "probs",
        "logits",
        "samples",
        "stddev",
        "variance",
        "entropy",
        "mutual_information",
        "epistemic",
    ),
    "binary": ("probs", "stddev", "entropy", "mutual_information", "epistemic", "deviations", "outputs"),
    "regression": ("mean", "stddev", "epistemic", "observation_variance", "samples"),
    "heteroscedastic": ("mean", "stddev", "noise_variance", "observation_variance", "epistemic", "samples"),
    "poisson": ("mean", "log_rate", "observation_variance", "epistemic"),
}


def run_onnx(path: Path, names: tuple[str, ...], x: Tensor) -> dict[str, Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    assert [output.name for output in session.get_outputs()] == list(names)
    values = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return dict(zip(names, map(torch.from_numpy, values), strict=True))


def of_networks(**marks: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Parameters of a test: networks, of which some are marked."""
    networks = [
        ("mlp", "binary", {}),
        ("cnn", "classification", {}),
        ("lenet", "regression", {}),
        ("vit", "classification", {}),
        ("lenet", "classification", LAST),
        ("mlp", "regression", LAST),
    ]
    names = [f"{name}_last" if settings else name for name, _, settings in networks]
    parameters = [
        pytest.param(*network, id=name, marks=marks.get(name, ()))
        for name, network in zip(names, networks, strict=True)
    ]
    return pytest.mark.parametrize(("name", "likelihood", "settings"), parameters)


@of_networks(cnn=pytest.mark.slow, lenet=pytest.mark.slow, vit=pytest.mark.slow, lenet_last=pytest.mark.slow)
def test_exported_it_predicts(name: str, likelihood: str, settings: dict) -> None:
    la, x = fitted(name, likelihood, **settings)
    module = la.to_module(outputs=QUANTITIES[likelihood])
    assert isinstance(module.program, HeadProgram) == bool(settings) == module.exact
    program = torch.export.export(module, (x[:2],), dynamic_shapes=BATCH).module()
    for batch in (x[:1], x[:5]):
        assert_predicts(module(batch), la, batch)
        assert_predicts(program(batch), la, batch)


@pytest.mark.slow
@of_networks(cnn=pytest.mark.nightly, lenet=pytest.mark.nightly, mlp_last=pytest.mark.nightly)
def test_as_onnx_it_predicts(name: str, likelihood: str, settings: dict, tmp_path: Path) -> None:
    for library in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(library, reason="the extra `onnx` is not installed")
    la, x = fitted(name, likelihood, **settings)
    module = la.to_module(outputs=QUANTITIES[likelihood])
    save_onnx(module, tmp_path / "module.onnx", x[:1])
    for batch in (x[:1], x[:5]):
        assert_predicts(run_onnx(tmp_path / "module.onnx", module.outputs, batch), la, batch)


@pytest.mark.parametrize("likelihood", QUANTITIES)
@pytest.mark.parametrize("settings", [{}, LAST], ids=["all", "last"])
def test_every_quantity_in_float64(likelihood: str, settings: dict) -> None:
    if likelihood == "heteroscedastic":  # means and log variances
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        x, y = torch.randn(9, 5, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64)
        method = settings.get("method", "auto" if settings else "krylov")
        la = LinearisedLaplace(model, likelihood, num_samples=5, method=method, **settings)
        scaled(la.fit([(x, y)], progress=False), 0.6)
    else:
        la, x = fitted("mlp", likelihood, torch.float64, **settings)
    found = la.to_module(outputs=QUANTITIES[likelihood])(x)
    assert tuple(found) == QUANTITIES[likelihood]
    assert_predicts(found, la, x, 1e-9)


@pytest.mark.parametrize("likelihood", ["regression", pytest.param("classification", marks=pytest.mark.slow)])
@pytest.mark.parametrize("settings", [LAST, pytest.param({}, marks=pytest.mark.slow)], ids=["last", "all"])
def test_it_changes_its_precision_and_its_device(likelihood: str, settings: dict) -> None:
    la, x = fitted("mlp", likelihood, **settings)
    module = la.to_module(outputs=QUANTITIES[likelihood])
    expected = module(x)
    # What rounding of inputs, weights and samples makes of probabilities and standard deviations of about one.
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.float16, 2e-2), (torch.bfloat16, 0.2)):
        for name, value in copy.deepcopy(module).to(dtype)(x.to(dtype)).items():
            assert value.dtype == torch.promote_types(dtype, torch.float32)
            assert_close(value, expected[name], rtol=tolerance, atol=tolerance, check_dtype=False)
    elsewhere = copy.deepcopy(module).to("meta")(x.to("meta"))
    assert all(value.is_meta and value.shape == expected[name].shape for name, value in elsewhere.items())


def test_a_noise_precision_beyond_half_precision() -> None:
    """Of targets in small units."""
    model, x = nn.Linear(5, 1).double(), torch.randn(12, 5).double()
    la = LinearisedLaplace(model, Gaussian(1e7, learn=False), method="krylov", num_samples=4, **LAST)
    la.fit([(x, model(x).detach())], progress=False)
    module = la.to_module(outputs=["observation_variance"])
    expected = module(x)["observation_variance"]
    assert_close(module.half()(x.half())["observation_variance"], expected, rtol=1e-2, atol=0, check_dtype=False)


# The networks are not trained.
@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
def test_temperature_noise_and_scale_of_validation_data_are_inside() -> None:
    la, x = fitted("mlp")
    labels = torch.randint(3, (40,), generator=torch.Generator().manual_seed(1))
    la.calibrate([(torch.randn(40, 5, generator=torch.Generator().manual_seed(2)), labels)])
    assert la.temperature_ != 1
    assert_predicts(la.to_module(outputs=("logits", "probs", "stddev"))(x), la, x)
    la, x = fitted("mlp", "regression")
    la.calibrate([(x, torch.randn(8, 3))])
    assert la.calibration_.noise != 1
    assert_predicts(la.to_module(outputs="observation_variance")(x), la, x)


def test_the_first_samples_and_the_usual_outputs() -> None:
    la, x = fitted("mlp")
    module, pred = la.to_module(num_samples=3), la.predict(x, num_samples=3)
    assert module.outputs == ("probs", "stddev", "epistemic")
    assert_close(module(x)["probs"], pred.probs)
    assert la.to_module(outputs="samples", num_samples=2)(x)["samples"].shape == (2, 8, 3)
    assert fitted("mlp", "regression", **LAST)[0].to_module().outputs == ("mean", "stddev", "epistemic")


# The networks are not trained.
@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
@pytest.mark.parametrize(
    ("likelihood", "conformal", "penalty"),
    [
        ("regression", False, None),
        ("regression", True, None),
        ("binary", False, None),
        ("classification", True, None),
        ("classification", True, 0.1),
    ],
)
def test_intervals_and_sets_of_a_level(likelihood: str, conformal: bool, penalty: float | None) -> None:
    """Held-out targets that are far from the network, or its most probable class, change intervals and sets."""
    la, x = fitted("mlp", likelihood)
    x_held = torch.randn(30, 5, generator=torch.Generator().manual_seed(3))
    pred = la.predict(x_held)
    y_held = pred.probs.argmax(1) if likelihood == "classification" else pred.outputs + 5
    plain = _at_level(la.predict(x))
    if conformal:
        la.calibrate_conformal([(x_held, y_held)], penalty=penalty)
    expected = _at_level(la.predict(x))
    assert conformal == any(not torch.equal(value, plain[name]) for name, value in expected.items())
    module = la.to_module(level=0.8)
    assert module.outputs[-len(expected) :] == tuple(expected)
    found = module(x)
    for name, value in expected.items():
        assert_close(found[name], value)
    assert not any(t.shape[0] == 30 for t in module.state_dict().values() if t.dim())  # no scores of single data
    program = torch.export.export(module, (x[:2],), dynamic_shapes=BATCH).module()
    assert_close(program(x)[name], expected[name])


def _at_level(pred: Any) -> dict[str, Tensor]:
    if hasattr(pred, "interval"):
        return dict(zip(("lower", "upper"), pred.interval(0.8), strict=True))
    return {"set": pred.prediction_set(0.8)}


def test_sets_of_samples_where_covariances_are_known() -> None:
    """Sets of truth values are compared as well, where a notice names what is of samples."""
    la, x = fitted("mlp", method="kfac")
    with pytest.warns(UserWarning, match="stddev"):
        found = la.to_module(level=0.9)(x)["set"]
    assert found.dtype == torch.bool
    assert (found == la.predict(x).prediction_set(0.9)).double().mean() > 0.8


def test_levels_that_a_module_cannot_have() -> None:
    la, x = fitted("mlp", "poisson")
    with pytest.raises(ValueError, match="'poisson'"):
        la.to_module(level=0.9)
    T = torch.randn(2, 3)
    measured = LinearisedLaplace(nn.Linear(5, 3), Gaussian(4.0, observe=T), method="exact", num_samples=2)
    measured.fit([(torch.randn(6, 5), torch.randn(6, 2))], progress=False)
    with pytest.raises(ValueError, match="of measurements"):
        measured.to_module(level=0.9)
    la, x = fitted("mlp", "regression")
    with pytest.raises(ValueError, match="level"):
        la.to_module(level=1.5)
    la.calibrate_conformal([(x, torch.randn(8, 3))])
    with pytest.raises(ValueError, match="leave `num_samples` out"):
        la.to_module(num_samples=3, level=0.8)
    la, x = fitted("mlp", "regression", method="exact")
    la.calibrate_conformal([(x, torch.randn(8, 3))])
    with pytest.raises(ValueError, match="guarantee would not hold"):
        la.to_module(level=0.5)


def test_it_holds_its_tensors_and_no_data() -> None:
    la, x = fitted("lenet")
    module, data = la.to_module(), la._fitted
    assert data is not None
    held = {tuple(t.shape) for t in module.state_dict().values()}
    assert {(6, *p.shape) for p in la.network.source.parameters()} <= held  # samples
    assert not any(p.requires_grad for p in module.parameters())
    known = [o for part in module.modules() for o in vars(part).values()]
    assert not any(type(o).__module__.startswith("laplace_sampling") and not isinstance(o, nn.Module) for o in known)
    expected, file = module(x), io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(module)):
        assert all(torch.equal(value, expected[name]) for name, value in other(x).items())
    with torch.no_grad():  # the network itself may change
        next(la.network.source.parameters()).zero_()
    assert all(torch.equal(value, expected[name]) for name, value in module(x).items())


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, LAST], ids=["all", "last"])
def test_it_compiles_without_a_break(settings: dict) -> None:
    la, x = fitted("mlp", **settings)
    # `aot_eager` traces all that inductor does, without the minutes of a C++ compiler.
    compiled = torch.compile(la.to_module(), fullgraph=True, backend="aot_eager")
    assert_predicts(compiled(x), la, x)


@pytest.mark.parametrize("settings", [{}, LAST], ids=["all", "last"])
def test_a_loaded_posterior(settings: dict, tmp_path: Path) -> None:
    la, x = fitted("mlp", **settings)
    la.save(tmp_path / "posterior.pt")
    again = LinearisedLaplace.load(tmp_path / "posterior.pt", la.network.source)
    module = again.to_module()
    assert isinstance(module.program, HeadProgram) == bool(settings)
    assert_predicts(module(x), la, x)


def test_masks() -> None:
    mask = torch.zeros(3, 8, dtype=torch.bool)
    mask[1, 2:] = True
    la, x = fitted("mlp", parameters={"2.weight": mask})
    assert_predicts(la.to_module()(x), la, x)


@pytest.mark.slow
def test_pixels_and_a_dictionary_of_inputs() -> None:
    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 3, 1))

        def forward(self, image: Tensor, offset: Tensor) -> dict[str, Tensor]:
            return {"logits": self.net(image + offset[:, :, None, None])}

    torch.manual_seed(0)
    x = {"image": torch.randn(6, 1, 4, 4), "offset": torch.randn(6, 1)}
    for settings in ({"method": "krylov"}, {"parameters": "last_layer", "method": "krylov"}):
        la = LinearisedLaplace(Pixels(), Categorical(class_dim=1), num_samples=4, **settings)
        la.fit([({**x, "labels": torch.randint(3, (6, 4, 4))})], tolerance=0.1, progress=False)
        found = la.to_module()(x)
        assert found["epistemic"].shape == (6, 4, 4)
        assert_predicts(found, la, x)


@pytest.mark.parametrize("change", ["quantised", "pruned", "linear"])
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")  # torch's own calls
def test_any_body_before_a_random_last_layer(change: str) -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(5, 16), nn.ReLU())
    if change == "quantised":
        body = torch.ao.quantization.quantize_dynamic(body, {nn.Linear})
    if change == "pruned":
        prune.l1_unstructured(body[0], "weight", 0.5)
    head = nn.Linear(16, 3)
    model = nn.Linear(5, 3) if change == "linear" else nn.Sequential(body, head)
    x, y = torch.randn(20, 5), torch.randint(3, (20,))
    la = LinearisedLaplace(model, "classification", num_samples=5, **LAST).fit([(x, y)], progress=False)
    module = la.to_module(outputs=("probs", "stddev", "epistemic", "samples"))
    assert module.exact
    assert_predicts(module(x[:7]), la, x[:7])


def test_a_body_that_is_quantised_afterwards() -> None:
    """Its inputs of the last layer are others, and the posterior of that layer is what it was."""
    la, x = fitted("mlp", "regression", **LAST)
    module = la.to_module()
    for parameter in module.program.body.parameters():  # a stand-in for fewer bits
        parameter.copy_((parameter * 64).round() / 64)
    found, z, fit = module(x), module.program.body(x), la._fitted.fit
    layer = la.network.head
    assert_close(found["mean"], layer(z))
    variance = la.scale_ * fit.covariance_at(features_at(layer, z)).variance()
    assert_close(found["stddev"].double(), variance.sqrt(), rtol=1e-5, atol=1e-6)
    assert float((found["stddev"] - la.predict(x).stddev).abs().max()) > 1e-4


def test_noise_of_samples_is_told_where_covariances_are_known() -> None:
    la, x = fitted("mlp", "regression", method="exact")
    message = "stddev"
    with pytest.warns(UserWarning, match=message):
        module = la.to_module()
    assert_close(module(x)["stddev"], (la.predict(x).deviations ** 2).mean(0).sqrt())
    assert_close(la.to_module(outputs="mean")(x)["mean"], la.predict(x).mean)  # without a notice


def test_errors() -> None:
    model = nn.Linear(5, 3)
    with pytest.raises(NotFittedError, match="to_module"):
        LinearisedLaplace(model, "classification").to_module()
    la, x = fitted("mlp")
    with pytest.raises(ValueError, match="'mean'"):
        la.to_module(outputs=["mean"])
    with pytest.raises(ValueError, match=r"outputs=\[\]"):
        la.to_module(outputs=[])
    with pytest.raises(ValueError, match="num_samples=7"):
        la.to_module(7)
    with pytest.raises(ValueError, match="num_samples"):
        la.to_module(0)
    with pytest.raises(TypeError, match="save_onnx"):
        save_onnx(model, "x.onnx", x)  # pyright: ignore
    with torch.no_grad():
        next(la.network.source.parameters()).zero_()
    la.to_module()  # of the weights of the fit


def test_several_heads_are_refused() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"a": self.a(x), "b": self.b(x)}

    x, y = torch.randn(6, 2), {"a": torch.randn(6, 1), "b": torch.ones(6, 1)}
    la = LinearisedLaplace(Heads(), {"a": Gaussian(1.0, learn=False), "b": "binary"}, method="krylov", num_samples=2)
    la.fit([(x, y)], progress=False)
    with pytest.raises(ValueError, match="heads"):
        la.to_module(outputs="stddev")


def test_an_example_is_asked_for_where_no_data_are_kept() -> None:
    la, x = fitted("mlp")
    fitted_ = la._fitted
    assert fitted_ is not None
    object.__setattr__(fitted_.posterior, "function", None)
    with pytest.raises(ValueError, match="example="):
        la.to_module()
    assert_predicts(la.to_module(example=x[:1].numpy())(x), la, x)
    with pytest.raises(ValueError, match="NaN"):
        la.to_module(example=x * torch.nan)


def test_what_torch_does_not_see_is_found() -> None:
    """A network that is exported has lost its `detach`."""

    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 3), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x).detach()

    x, y = torch.randn(8, 2), torch.randint(3, (8,))
    la = LinearisedLaplace(Detached(), "classification", method="krylov", num_samples=2).fit([(x, y)], progress=False)
    with pytest.raises(ValueError, match="deviations"):
        la.to_module()


def works_compiler(folder: Path) -> bool:
    """Whether a C++ program can be compiled for AOTInductor, which links the libraries of torch and OpenMP."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    source = folder / "probe.cpp"
    source.write_text("#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n")
    try:
        call = [get_cpp_compiler(), "-std=c++17", "-fopenmp", str(source), "-o", str(folder / "probe")]
        return subprocess.run(call, capture_output=True, check=False).returncode == 0
    except Exception:  # torch has an error of its own where there is no compiler
        return False


@pytest.mark.slow
def test_compiled_ahead_of_time_it_predicts(tmp_path: Path) -> None:
    if not works_compiler(tmp_path):
        pytest.skip("there is no C++ compiler that works")
    la, x = fitted("mlp", **LAST)  # one, as the compiler takes seconds
    module = la.to_module(outputs=("probs", "stddev"))
    package = torch._inductor.aoti_compile_and_package(
        torch.export.export(module, (x,), dynamic_shapes=BATCH), package_path=str(tmp_path / "error_bars.pt2")
    )
    compiled = torch._inductor.aoti_load_package(package)
    for rows in (len(x), 1):
        assert_predicts(compiled(x[:rows]), la, x[:rows])
