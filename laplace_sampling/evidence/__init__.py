"""Hyperparameters by evidence: expectation maximisation, curves over the prior precision, and their fixed point.

- `fit_em`, `EMResult` (`em`): expectation maximisation on posterior samples.
- `fit_path`, `PathResult` (`fixed_point`): prior and noise precision from a few Krylov runs.
- `evidence_path` (`krylov_curves`), `exact_path` (`dense_curves`): the curves around a mode.
- `EvidencePath`, `EvidenceCurves`, `MarginalLikelihood` (`curves`): evidence as a function of the prior precision.
- `Step` (`step`): the record of a step of a fit.
"""

from laplace_sampling.evidence.curves import EvidenceCurves as EvidenceCurves
from laplace_sampling.evidence.curves import EvidencePath as EvidencePath
from laplace_sampling.evidence.curves import MarginalLikelihood as MarginalLikelihood
from laplace_sampling.evidence.dense_curves import exact_path as exact_path
from laplace_sampling.evidence.em import EMResult as EMResult
from laplace_sampling.evidence.em import fit_em as fit_em
from laplace_sampling.evidence.fixed_point import PathResult as PathResult
from laplace_sampling.evidence.fixed_point import fit_path as fit_path
from laplace_sampling.evidence.krylov_curves import evidence_path as evidence_path
from laplace_sampling.evidence.step import Step as Step
