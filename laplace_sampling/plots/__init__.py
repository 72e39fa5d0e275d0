"""Pictures of predictions and of fits, with matplotlib: `pip install "laplace_sampling[plots]"`.

Each function draws on the `ax` that it is given, or on a new figure, and returns the `Axes`. It shows nothing and
changes no settings of matplotlib.

- `plot_reliability`: how often predictions are right that claim to be.
- `plot_error_bars`: predictions of a regression with their intervals.
- `plot_ood`: scores of inputs like the training data, and of others.
- `plot_history`: the steps of `fit_hyperparameters`.
- `plot_evidence`: the log marginal likelihood against the prior precision.
- `plot_evaluation`: the scores of `evaluate`.
"""

from laplace_sampling.plots.pictures import plot_error_bars as plot_error_bars
from laplace_sampling.plots.pictures import plot_evaluation as plot_evaluation
from laplace_sampling.plots.pictures import plot_evidence as plot_evidence
from laplace_sampling.plots.pictures import plot_history as plot_history
from laplace_sampling.plots.pictures import plot_ood as plot_ood
from laplace_sampling.plots.pictures import plot_reliability as plot_reliability
