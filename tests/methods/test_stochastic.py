"""Mini-batches: the preconditioner, and when one is worth having."""

from flat_settings import laplace_of
from problems import linear_problem

from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.preconditioners import Nystrom
from laplace_sampling.solvers.svrg import SVRG


def test_svrg_makes_one_preconditioner_for_em_and_all_samples(monkeypatch) -> None:
    made, solves = [], []
    of_rows, solve = Nystrom.of_rows.__func__, SVRG.solve
    monkeypatch.setattr(Nystrom, "of_rows", classmethod(lambda *a, **k: made.append(1) or of_rows(*a, **k)))
    monkeypatch.setattr(SVRG, "solve", lambda *a, **k: solves.append(solve(*a, **k)) or solves[-1])
    monkeypatch.setattr(SVRG, "minimise", lambda _, *a, **k: Dense().minimise(*a, **k))  # the mode is found without
    model, data = linear_problem(inputs=10, num_data=40)
    la = laplace_of(model, "regression", method="svrg", prior="layerwise", num_samples=2)
    la.fit_hyperparameters(
        data, num_samples=4, tolerance=0.05, max_steps=30, progress=False
    )  # the noise is learnt, too
    steps = len(la.history_)
    assert len(solves) == steps + 1
    la.sample(2)
    la.sample(1)
    assert len(solves) == steps + 3 > 5
    assert len(made) == 1
