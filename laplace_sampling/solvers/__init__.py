"""Solvers of large linear systems and convex problems, by products with a matrix; imports torch and scipy only.

- `Operator`: a matrix that is known by its products (`operator`).
- `Quadratic`, `Objective`, and what a `Solver` returns, `Solution` and `Minimum` (`solver`).
- `BlockKrylov`, `CG` (`krylov`); `SGD` (`sgd`); `SVRG` (`svrg`); `Dense` (`dense`): the solvers.
- `Preconditioner`, `Nystrom`, `Jacobi` (`preconditioners`): approximate inverses.
- `Quadrature`, `TraceEstimator` (`quadrature`): traces of functions of a matrix.
"""

from laplace_sampling.solvers.dense import Dense as Dense
from laplace_sampling.solvers.krylov import CG as CG
from laplace_sampling.solvers.krylov import BlockKrylov as BlockKrylov
from laplace_sampling.solvers.operator import Operator as Operator
from laplace_sampling.solvers.preconditioners import Jacobi as Jacobi
from laplace_sampling.solvers.preconditioners import Nystrom as Nystrom
from laplace_sampling.solvers.preconditioners import Preconditioner as Preconditioner
from laplace_sampling.solvers.quadrature import Quadrature as Quadrature
from laplace_sampling.solvers.quadrature import TraceEstimator as TraceEstimator
from laplace_sampling.solvers.sgd import SGD as SGD
from laplace_sampling.solvers.solver import ConvergenceWarning as ConvergenceWarning
from laplace_sampling.solvers.solver import Minimum as Minimum
from laplace_sampling.solvers.solver import Objective as Objective
from laplace_sampling.solvers.solver import Quadratic as Quadratic
from laplace_sampling.solvers.solver import Solution as Solution
from laplace_sampling.solvers.solver import Solver as Solver
from laplace_sampling.solvers.svrg import SVRG as SVRG
