"""Whether a network computes what it computed at the fit: weights and buffers do not tell, as one activation for
another leaves them as they are.

`FunctionFingerprint` runs the network on a few data; `load` compares it.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.data.batches import num_bytes, num_rows, place, storable
from laplace_sampling.data.training_data import TrainingData
from laplace_sampling.networks.agreement import difference, rounding
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.solving import solving

# Data that are kept, fewer if they are larger than so many bytes, and outputs of each datum. The numbers are not tuned:
# another activation shows at a single datum.
_NUM_DATA, _MOST_BYTES, _MOST_OUTPUTS = 4, 2**22, 4096
# The relative difference that another machine or device may make. Two MLPs, two CNNs and a ResNet-18 differ by 1e-7 in
# float32, by 1e-3 with weights in TF32, and once trained by 0.06 with an autocast to bfloat16 in their forward. Of nine
# other activations only a leaky ReLU of slope 0.01 for a ReLU differs by less than 0.1 in outputs and derivatives.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class FunctionFingerprint:
    """What a network computes at a few inputs, without `autocast`.

    Attributes:
        inputs: training data, at most four.
        outputs: `f(w̄, x)`; of a datum with many outputs, some of them.
        product: `φ(x) v` of the same outputs, `v` being signs from a generator with a fixed seed.
    """

    inputs: Any
    outputs: Float[Tensor, "n c"]
    product: Float[Tensor, "n c"]

    @classmethod
    def of(cls, network: Linearisation, data: TrainingData) -> "FunctionFingerprint | None":
        """At some of the training data.

        `None` where a file cannot hold them, or where the network does not compute the same or what is finite twice.
        """
        inputs = _some_inputs(data, network.batching.max_rows or _NUM_DATA)
        try:
            inputs = storable(inputs)
        except TypeError:
            return None
        computed, again = (_computed(network, inputs) for _ in range(2))
        same = all(difference(b, a) <= _tolerance(network) for a, b in zip(computed, again, strict=True))
        return cls(inputs, *computed) if same and bool(computed[1].isfinite().all()) else None

    def difference(self, network: Linearisation) -> str | None:
        """In words, how far a network is from this one on the same data; `None` if it is the same up to rounding."""
        now = _computed(network, self.inputs)
        outputs, product = (difference(a, b) for a, b in zip(now, (self.outputs, self.product), strict=True))
        tolerance = _tolerance(network)
        if outputs <= tolerance and product <= tolerance:
            return None
        return (
            f"on {num_rows(self.inputs)} of the training data its outputs differ by {outputs:.2g} of their size, and "
            f"its derivatives by {product:.2g}"
        )


def _some_inputs(data: TrainingData, most: int) -> Any:
    """Few data, from the first to the last; the first ones of data that are read in order."""
    first = data.inputs(torch.arange(1))
    num = max(1, min(_NUM_DATA, most, data.num_data, _MOST_BYTES // max(1, num_bytes(first))))
    step = 1 if data.in_order else data.num_data // num
    return data.inputs(torch.arange(num) * step)


def _tolerance(network: Linearisation) -> float:
    """The relative difference that is none."""
    return max(_TOLERANCE, rounding(network.module_dtype))


@solving()
def _computed(network: Linearisation, x: Any) -> tuple[Tensor, Tensor]:
    """Outputs and product, on a CPU in float64."""
    # Without autocast, which is a setting of the method: it may be another one after `load`.
    plain = network.with_names(network.names)
    plain.shell.autocast, plain.products = None, {"jvp": 0, "vjp": 0}
    x = place(x, plain.device, plain.dtype)
    signs = torch.randint(2, (plain.num_parameters,), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    v = (2 * signs - 1).to(plain.device, plain.dtype)
    # With a graph outputs are computed as products are; without one, in the precision that the user has set.
    rows = plain(x, graph=True).detach().reshape(num_rows(x), -1), plain.jvp(x, v[None])[0]
    step = math.ceil(rows[0].shape[1] / _MOST_OUTPUTS) or 1
    outputs, product = (of[:, ::step].double().cpu() for of in rows)
    return outputs, product
