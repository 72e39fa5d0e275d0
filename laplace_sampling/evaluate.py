"""One table of the scores that papers report: of the network alone, of the network with a temperature, and of ours."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from laplace_sampling.data.batches import flattened
from laplace_sampling.data.training_data import Data, unpacking
from laplace_sampling.laplace import LinearisedLaplace
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.labels import Labels
from laplace_sampling.plots.fits import plot_evaluation
from laplace_sampling.predictions.prediction import ClassificationPrediction
from laplace_sampling.predictions.scores import SCORES, scores_of_kind, told_apart
from laplace_sampling.production import inputs_of

_NO_DATA = Data()
# A network alone with a number that held-out data chose: the name of its row, and the change of its predictions.
_Own = tuple[str, Callable[[Any], Any]] | None


@dataclass(frozen=True)
class Evaluation:
    """Scores of predictions on test data; `print` it for a table.

    Attributes:
        table: a dictionary for each predictor, `"network"`, `"temperature"` or `"noise"`, and `"laplace"`, with the
            scores by name. NaN where there is none, such as a score of other data of a plain regression.
        num_data: the number of test data.
        num_other: the number of other data.
        other_score: the score that finds other data, `"novelty"`, `"entropy"` or `"epistemic"`, of each predictor; a
            dash where there is none.
    """

    table: dict[str, dict[str, float]]
    num_data: int
    num_other: int = 0
    other_score: dict[str, str] = field(default_factory=dict)

    def frame(self) -> Any:
        """The table as a pandas `DataFrame`, a row for each predictor.

        Raises:
            ImportError: without pandas.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise ImportError("`Evaluation.frame()` needs pandas: pip install pandas. `table` has the same.") from error
        return pandas.DataFrame.from_dict(self.table, orient="index")

    def plot(self, ax: Any = None) -> Any:
        """Draw a panel for each score, by `laplace_sampling.plots.plot_evaluation`; returns the first `Axes`."""
        return plot_evaluation(self, ax)

    def __str__(self) -> str:
        names = list(next(iter(self.table.values())))
        width = max(len(SCORES[name][0]) for name in names)
        arrows = {True: "↑", False: "↓", None: " "}
        lines = [f"{f'{self.num_data} test data':{width}}    " + "".join(f"{row:>13}" for row in self.table)]
        for name in names:
            label, larger = SCORES[name]
            values = (row[name] for row in self.table.values())
            cells = "".join(f"{'–' if math.isnan(value) else f'{value:.4g}':>13}" for value in values)
            lines.append(f"{label:{width}}  {arrows[larger]} {cells}")
        if self.other_score:
            by = "".join(f"{score:>13}" for score in self.other_score.values())
            lines.append(f"{f'{self.num_other} other data found by':{width}}    {by}")
        return "\n".join(lines)


def evaluate(
    la: LinearisedLaplace,
    test_loader: Iterable[Any],
    other: Iterable[Any] | None = None,
    *,
    val_loader: Iterable[Any] | None = None,
    data: Data = _NO_DATA,
) -> Evaluation:
    r"""The scores that papers report, on test data, of the network with error bars and of the network alone.

    There is a row for each predictor: `"network"`, the output that the network has without error bars, for a regression
    with the noise of the fit; with `val_loader` `"temperature"`, the network whose logits are divided by the
    temperature of smallest log loss on these data (Guo et al. 2017), or for a regression `"noise"`, the network with
    the mean squared error on them as its noise; and `"laplace"`, `la.predict`.

    Of a classification, means over labels, where `p` are the predicted probabilities:

    - `log_loss`: `−log p_y`, in nats; `brier`: `Σ_c (p_c − 1[y = c])²`, and `(p₁ − y)²` for labels of zero and one.
    - `calibration_error`: the expected one, `Σ_b (n_b/N) |acc_b − conf_b|`, in 15 bins of equal width; `accuracy`.
    - `rejection`: the accuracy on the share of labels with the largest probabilities, averaged over all shares; the
      area under the accuracy-rejection curve. `error_auroc`: how well `1 − max_c p_c` tells errors from right labels.

    Of a regression, with noise, in the units of the targets:

    - `log_loss`: `−log p(y)`, joint over the outputs of a datum; `rmse`; `crps`: the continuous ranked probability
      score of a normal distribution, `σ (z (2Φ(z) − 1) + 2φ(z) − 1/√π)`, `z = (y − μ)/σ` (Gneiting and Raftery 2007).
    - `coverage_90`, `width_90`: the share of targets in `interval(0.9)`, and its mean width.

    With `other`, how well test data are told from them: `other_auroc`, the area under the ROC curve, and `other_fpr95`,
    the share of test data that are taken for other data where 95 % of the other data are found. The score is `novelty`
    after `la.calibrate_novelty`, else the entropy of the probabilities, or `epistemic` of a regression.

    Scores that torchmetrics has are by torchmetrics.

    Args:
        la: a fitted model.
        test_loader: batches `(x, y)` of data that nothing was fitted to. Missing labels and targets do not count.
        other: batches `(x, y)` or `x` of inputs that are not like the training data; targets are not used.
        val_loader: data by which the network alone gets its temperature or noise. They may be those of the fit.
        data: how to unpack the batches of all loaders, `Data(unpack=...)`.

    Raises:
        ImportError: without torchmetrics.
        NotFittedError: before a fit.
        TypeError, ValueError: for batches of another form; without test data; for soft labels; for a likelihood that is
            neither a regression nor a classification, several heads, and `Gaussian(observe=...)`.

    Example:
        >>> import torch
        >>> from laplace_sampling import LinearisedLaplace, evaluate
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> y = x + 0.1 * torch.cos(50 * x)
        >>> model = torch.nn.Linear(1, 1)
        >>> _ = torch.nn.init.ones_(model.weight), torch.nn.init.zeros_(model.bias)
        >>> la = LinearisedLaplace(model, "regression").fit_hyperparameters([(x, y)], progress=False)
        >>> scores = evaluate(la, [(x[::2], y[::2])])
        >>> list(scores.table), sorted(scores.table["laplace"])
        (['network', 'laplace'], ['coverage_90', 'crps', 'log_loss', 'rmse', 'width_90'])
    """
    try:
        import torchmetrics.functional as metrics
    except ImportError as error:
        raise ImportError(
            "`evaluate` computes scores by torchmetrics: pip install laplace_sampling[torchmetrics]"
        ) from error
    data.check("evaluate", "unpack")
    likelihood = la.posterior_.likelihood
    kind = scores_of_kind(likelihood)
    if kind is None:
        raise ValueError(
            "`evaluate` has scores of regressions and classifications, of one head and without `observe`, but the "
            f"likelihood is {likelihood.name!r}. `predict(x).log_prob(y)` is there for each likelihood."
        )
    own = None if val_loader is None else _chosen(la, _predicted(la, val_loader, data))
    parts: dict[str, list[Any]] = {}
    inside: dict[str, list[Tensor]] = {}
    num_data, num_other = 0, 0
    for pred, y in _predicted(la, test_loader, data):
        of_likelihood, targets = pred._prepared(y, "evaluate(test_loader)", some_given=False)
        num_data += len(pred.outputs)
        for name, row in _rows(la, pred, own).items():
            parts.setdefault(name, []).append(kind.of(row, of_likelihood, targets))
            if other is not None:
                inside.setdefault(name, []).append(_strangeness(row)[1])
    if not parts:
        raise ValueError("`evaluate(test_loader)` needs test data, but the loader has none.")
    table = {name: kind.joined(of_row).scores(metrics) for name, of_row in parts.items()}
    if other is None:
        return Evaluation(table, num_data)
    outside: dict[str, list[Tensor]] = {}
    by: dict[str, str] = {}
    for batch in _batches(other, la.posterior_.rows):
        x = inputs_of("evaluate(other=...)", batch) if data.unpack is None else data.unpack(batch)[0]
        pred = la.predict(x)
        num_other += len(pred.outputs)
        for name, row in _rows(la, pred, own).items():
            by[name], values = _strangeness(row)
            outside.setdefault(name, []).append(values)
    if not outside:
        raise ValueError("`evaluate(other=...)` needs other data, but the loader has none.")
    for name, of_row in table.items():
        of_row |= told_apart(torch.cat(inside[name]), torch.cat(outside[name]), metrics)
    return Evaluation(table, num_data, num_other, by)


def _batches(loader: Iterable[Any], rows: int) -> Iterable[Any]:
    return DataLoader(loader, batch_size=rows) if isinstance(loader, Dataset) else loader


def _predicted(la: LinearisedLaplace, loader: Iterable[Any], data: Data) -> Iterator[tuple[Any, Any]]:
    """Predictions and targets of each batch."""
    pair = unpacking(data.unpack)
    for batch in _batches(loader, la.posterior_.rows):
        x, y = pair(batch)
        yield la.predict(x), y


def _rows(la: LinearisedLaplace, pred: Any, own: _Own) -> dict[str, Any]:
    """The predictions of the network alone, and ours."""
    alone = _alone(la, pred)
    return {"network": alone} | ({} if own is None else {own[0]: own[1](alone)}) | {"laplace": pred}


def _alone(la: LinearisedLaplace, pred: Any) -> Any:
    """What the network predicts without error bars and calibration."""
    outputs = pred.outputs * la.calibration_.temperature
    likelihood, nothing = la.posterior_.likelihood.bind(pred._layout), torch.zeros_like(outputs)[None]
    bare = {"function": None, "conformal": None, "ranks": None}
    return replace(pred, outputs=outputs, sampled=nothing, likelihood=likelihood, **bare)


def _chosen(la: LinearisedLaplace, predicted: Iterator[tuple[Any, Any]]) -> _Own:
    """The temperature of smallest log loss; or the noise of largest likelihood, the mean squared error."""
    seen = []
    for pred, y in predicted:
        alone = _alone(la, pred)
        likelihood, targets = alone._prepared(y, "evaluate(val_loader=...)", some_given=False)
        seen.append((flattened(alone.outputs).double().cpu(), likelihood, targets.cpu()))
    if not seen:
        raise ValueError("`evaluate(val_loader=...)` needs held-out data, but the loader has none.")
    likelihood = la.posterior_.likelihood
    if isinstance(likelihood, Labels):
        from scipy.optimize import minimize_scalar  # slow to import

        def loss(log: float) -> float:
            return sum(float(of_batch.loss(f / math.exp(log), y).sum()) for f, of_batch, y in seen)

        found: Any = minimize_scalar(loss, bounds=(-5.0, 5.0), method="bounded")
        temperature = math.exp(float(found.x))
        return "temperature", lambda alone: replace(alone, outputs=alone.outputs / temperature)
    if not isinstance(likelihood, Gaussian):  # the network gives its variances itself
        return None
    squares = torch.cat([(y.reshape(f.shape) - f) ** 2 for f, _, y in seen])
    noise = squares.nanmean(0) if likelihood.noise_precisions().numel() > 1 else squares.nanmean()
    changed = likelihood.with_precision(1 / noise)
    return "noise", lambda alone: replace(alone, likelihood=changed.bind(alone._layout))


def _strangeness(pred: Any) -> tuple[str, Float[Tensor, " n"]]:
    """The score by which other data are found, and its values; those of the network alone in a regression are NaN."""
    if pred.ranks is not None:
        name, values = "novelty", pred.novelty
    elif isinstance(pred, ClassificationPrediction):
        name, values = "entropy", pred.entropy
    elif bool((pred.variance > 0).any()):
        name, values = "epistemic", pred.epistemic
    else:
        name, values = "–", torch.full((len(pred.outputs),), math.nan)
    return name, values.flatten().double().cpu()
