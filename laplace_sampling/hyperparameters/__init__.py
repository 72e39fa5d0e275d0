"""Hyperparameters: what chooses them, how they are searched for, and what a search finds.

- `Hyperparameters`, `Step` (`hyperparameters`): what a search finds, and the record of its steps.
- `Criterion` and its kinds (`criteria`): what chooses the prior precision; `Selection` (`rules`, `validation`): the
  rules of criteria that are not the evidence, on a `CovariancePath` (`covariance_path`).
- `fit_em` (`em`): expectation maximisation on posterior samples.
- `Traces`, `EvidencePath`, `EvidenceCurves`, `MarginalLikelihood` (`curves`): evidence as a function of the prior
  precision; `krylov_traces` where eigenvalues are not known.
- `NetworkEvidence` (`network_evidence`): the evidence at the weights of the network.
"""

from laplace_sampling.hyperparameters.curves import EvidenceCurves as EvidenceCurves
from laplace_sampling.hyperparameters.curves import EvidencePath as EvidencePath
from laplace_sampling.hyperparameters.curves import MarginalLikelihood as MarginalLikelihood
from laplace_sampling.hyperparameters.curves import Traces as Traces
from laplace_sampling.hyperparameters.curves import krylov_traces as krylov_traces
from laplace_sampling.hyperparameters.em import fit_em as fit_em
from laplace_sampling.hyperparameters.hyperparameters import Hyperparameters as Hyperparameters
from laplace_sampling.hyperparameters.hyperparameters import Step as Step
from laplace_sampling.hyperparameters.network_evidence import NetworkEvidence as NetworkEvidence
