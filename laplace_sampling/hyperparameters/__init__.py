"""Hyperparameters by evidence: expectation maximisation, curves over the prior precision, the network's evidence.

- `fit_em`, `EMResult` (`em`): expectation maximisation on posterior samples.
- `Traces`, `EvidencePath`, `EvidenceCurves`, `MarginalLikelihood` (`curves`): evidence as a function of the prior
  precision; `krylov_traces` (`lanczos`) where eigenvalues are not known.
- `NetworkEvidence` (`network_evidence`): the evidence at the weights of the network.
- `Step` (`step`): the record of a step of a fit.
"""

from laplace_sampling.hyperparameters.curves import EvidenceCurves as EvidenceCurves
from laplace_sampling.hyperparameters.curves import EvidencePath as EvidencePath
from laplace_sampling.hyperparameters.curves import MarginalLikelihood as MarginalLikelihood
from laplace_sampling.hyperparameters.curves import Traces as Traces
from laplace_sampling.hyperparameters.curves import krylov_traces as krylov_traces
from laplace_sampling.hyperparameters.em import EMResult as EMResult
from laplace_sampling.hyperparameters.em import Step as Step
from laplace_sampling.hyperparameters.em import fit_em as fit_em
from laplace_sampling.hyperparameters.network_evidence import NetworkEvidence as NetworkEvidence
