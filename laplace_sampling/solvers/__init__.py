"""Solvers of large linear systems and convex problems, by products with a matrix; imports torch and scipy only.

- `Operator`: a matrix that is known by its products (`operator`).
- `Quadratic`, `Objective`, and what a `Solver` returns, `Solution` and `Minimum` (`solver`).
- `BlockKrylov`, `CG` (`krylov`); `SGD` (`sgd`); `SVRG` (`svrg`); `Dense` (`dense`): the solvers.
- `RowBlocks`, a matrix that is known by its rows, and its solvers: `Cholesky`, `PivotedCG`, `Projections`,
  `DualDescent`, `Automatic` (`row_blocks`).
- `Preconditioner`, `Nystrom`, `Jacobi` (`preconditioners`): approximate inverses; `DenseCurvature` (`dense_curvature`).
- `Quadrature`, `TraceEstimator` (`quadrature`): traces of functions of a matrix.
"""
