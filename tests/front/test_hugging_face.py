"""Models of transformers with LoRA weights of peft: batches with `labels`, outputs with `logits`."""

import runpy
import warnings
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from laplace_sampling import ClassificationPrediction, LinearisedLaplace

REASON = "the extra `hugging_face` (transformers and peft) is not installed"
transformers = pytest.importorskip("transformers", reason=REASON)
peft = pytest.importorskip("peft", reason=REASON)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("example of Hugging Face")]


@pytest.fixture(scope="module")
def example() -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft calls what transformers deprecates
        return runpy.run_path(str(Path(__file__).parents[2] / "examples" / "lora.py"))


def test_the_example_is_shown_in_the_guide() -> None:
    """A formatter once took the line that includes it for Python."""
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    assert '--8<-- "examples/lora.py:example"' in guide


def test_the_example_runs_with_lora_weights_only(example: dict) -> None:
    la, pred = example["la"], example["pred"]
    assert all("lora" in name for name in la.network.names)
    assert la.network.num_parameters == sum(p.numel() for n, p in example["model"].named_parameters() if "lora" in n)
    assert isinstance(pred, ClassificationPrediction)
    assert_close(pred.probs.sum(1), torch.ones(4))
    assert (pred.mutual_information >= 0).all()


def test_outputs_are_the_logits_bit_for_bit(example: dict) -> None:
    model = example["model"].eval()
    batch = {"input_ids": example["ids"][:4], "attention_mask": torch.ones(4, 8, dtype=torch.long)}
    with torch.no_grad():
        assert torch.equal(example["pred"].outputs, model(**batch).logits)


def test_a_batch_encoding_is_a_batch(example: dict) -> None:
    la: LinearisedLaplace = example["la"]
    batch = {"input_ids": example["ids"][:3], "attention_mask": torch.ones(3, 8, dtype=torch.long)}
    encoding = transformers.BatchEncoding(batch)
    assert torch.equal(la.predict(encoding).samples, la.predict(batch).samples)


def test_products_are_those_of_finite_differences(example: dict) -> None:
    network = example["la"].network.in_float64()
    batch = {"input_ids": example["ids"][:2], "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(1, network.num_parameters, generator=generator, dtype=torch.float64)
    step, parameters = 1e-5, dict(network.module.named_parameters())

    def moved(length: float) -> torch.Tensor:
        with torch.no_grad():
            for name, part in network.unflatten(v[0]).items():
                parameters[name] += length * part
            out = network(batch)
            for name, part in network.unflatten(v[0]).items():
                parameters[name] -= length * part
        return out

    slope = (moved(step) - moved(-step)) / (2 * step)
    found = network.jvp(batch, v)[0]
    assert_close(found, slope, rtol=1e-5, atol=1e-7)
    assert_close(torch.einsum("ncp,p->nc", network.jacobian(batch), v[0]), found, rtol=1e-6, atol=1e-9)
    u = torch.randn(1, 2, 3, generator=generator, dtype=torch.float64)
    assert_close((network.vjp(batch, u) * v).sum(), (u * found).sum(), rtol=1e-6, atol=1e-9)
