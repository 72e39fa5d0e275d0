"""`Head`: the posterior of a linear last layer in closed form, of which the network gives the inputs.

The curvature is a sum over these inputs (`linear_model.head_curvature`): no product with the network is made, and
samples, covariances and evidence are closed forms for every prior precision. It is that of the linear model itself for
few weights and for a regression, else a Kronecker product.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace_sampling.linear_model.dense_curvature import DenseCurvature
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.head_curvature import head_block, head_matrix, head_of, is_exact
from laplace_sampling.methods.factored import Factored, FactoredFit
from laplace_sampling.methods.fit import Task, Tuned
from laplace_sampling.methods.method import Tuning, has_path
from laplace_sampling.methods.problem import Problem
from laplace_sampling.methods.solver_method import tuned_by_spectrum
from laplace_sampling.predictions.covariance_path import CovariancePath, HeadPath
from laplace_sampling.predictions.diagnosis import Accuracy
from laplace_sampling.predictions.function_covariance import FunctionCovariance, factored_covariance
from laplace_sampling.predictions.leave_one_out import LeaveOneOut, leave_one_out

# Tolerance of the mode in a search for the largest evidence, a definition; and in units of rounding: 100 were too few.
_MODE_ACCURACY, _ROUNDINGS = 1e-6, 3000


@dataclass(frozen=True, kw_only=True)
class Head(Factored):
    """The posterior of the weights of a linear last layer, `parameters="last_layer"`, in closed form."""

    kind: str = "last_layer"

    def check(self, problem: Problem) -> None:
        if head_of(problem.features) is None:
            raise ValueError(
                'method="last_layer" is for `parameters="last_layer"` of a network whose outputs are those of an '
                "`nn.Linear` of one vector a datum, and for data of equal noise without `observe`. Use "
                'method="auto".'
            )
        super().check(problem)

    def covariance_path(self, task: Task) -> CovariancePath:
        return HeadPath(self.curvature_at(task), task.prior)

    def tune_by_evidence(self, task: Task, tuning: Tuning) -> tuple[Task, Tuned]:
        if not (has_path(task) and is_exact(task.ggn())):
            return super().tune_by_evidence(task, tuning)
        # The mode to rounding, nearly, as the other numbers are.
        solver = self.make_solver(task, max(_MODE_ACCURACY, _ROUNDINGS * torch.finfo(task.dtype).eps), None)
        return tuned_by_spectrum(task, tuning, solver, *_spectrum(task.scaled_ggn()))

    def fit_of(self, *parts: object) -> "HeadFit":
        return HeadFit(*parts)  # pyright: ignore[reportArgumentType]


def _spectrum(ggn: GGN) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """All eigenvalues of the curvature of a linear layer, and the coordinates of vectors in its eigenvectors."""
    if (block := head_block(ggn)) is not None:
        return block.eigenvalues.flatten(), lambda v: block.turned(v).flatten(1)
    matrix = head_matrix(ggn)
    assert matrix is not None
    curvature = DenseCurvature.of(matrix, 0.0)
    return curvature.spectrum, lambda v: v @ curvature.vectors


@dataclass(frozen=True)
class HeadFit(FactoredFit):
    """A posterior of a linear last layer."""

    @property
    def accuracy(self) -> Accuracy:
        return replace(super().accuracy, approximate=self.approximate)

    @property
    def approximate(self) -> bool:
        return not is_exact(self.ggn)

    def covariance_at(self, features: Features) -> FunctionCovariance:
        return factored_covariance(features, self.prior, self.curvature)

    def leave_one_out(self) -> LeaveOneOut:
        if self.approximate:
            return super().leave_one_out()
        covariance = self.covariance_at(self.model.features).blocks()
        model = self.model
        mode_outputs, outputs = self.mode.outputs.double(), self.ggn.outputs.double()
        return leave_one_out(model.likelihood, model.targets, mode_outputs, outputs, covariance)

    def known_leave_one_out(self) -> LeaveOneOut | None:
        return None if self.approximate else self.leave_one_out()
