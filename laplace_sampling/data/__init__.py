"""Batches and training data.

- `batches`: how a batch is given to a network, and the `Layout` of the outputs that come back.
- `training_data`: `TrainingData`, the inputs and targets of a loader by index.
- `encoding`: inputs as tensors, for files.
"""

from laplace_sampling.data.batches import Layout as Layout
from laplace_sampling.data.encoding import decode_inputs as decode_inputs
from laplace_sampling.data.encoding import encode_inputs as encode_inputs
from laplace_sampling.data.training_data import TrainingData as TrainingData
