"""Batches and training data.

- `batches`: how a batch is given to a network, and the `Layout` of the outputs that come back.
- `training_data`: `TrainingData`, the inputs and targets of a loader by index.
"""

from laplace_sampling.data.batches import Layout as Layout
from laplace_sampling.data.training_data import TrainingData as TrainingData
