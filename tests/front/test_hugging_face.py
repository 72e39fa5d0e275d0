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


def test_the_example_is_shown_on_the_page_on_large_models() -> None:
    """A formatter once took the line that includes it for Python."""
    page = (Path(__file__).parents[2] / "docs" / "howto" / "large_models.md").read_text()
    assert '--8<-- "examples/lora.py:example"' in page


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
