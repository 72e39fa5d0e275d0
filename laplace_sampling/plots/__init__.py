"""Pictures of predictions and of fits, with matplotlib: `pip install "laplace_sampling[plots]"`.

Each function draws on the `ax` that it is given, or in its place if it has several panels, or on a new figure, and
returns the (first) `Axes`. It shows nothing and changes no settings of matplotlib. Colours are those of Okabe and Ito,
which stay apart for the colour-blind.

- `plot_reliability`: how often predictions are right that claim to be.
- `plot_error_bars`: predictions of a regression with their intervals.
- `plot_ood`: scores of inputs like the training data, and of others.
- `plot_rejection`: how good the predictions are that are left if the most unsure ones are not.
- `plot_prediction_sets`: how large the sets of classes are, and how often they contain the label.
- `plot_most_unsure`: the images that a score finds.
- `plot_evaluation`: the scores of `evaluate`.
- `plot_history`: the steps of `fit_hyperparameters`.
- `plot_evidence`: the log marginal likelihood against the prior precision.
"""

from laplace_sampling.plots.decisions import plot_most_unsure as plot_most_unsure
from laplace_sampling.plots.decisions import plot_prediction_sets as plot_prediction_sets
from laplace_sampling.plots.decisions import plot_rejection as plot_rejection
from laplace_sampling.plots.fits import plot_evaluation as plot_evaluation
from laplace_sampling.plots.fits import plot_evidence as plot_evidence
from laplace_sampling.plots.fits import plot_history as plot_history
from laplace_sampling.plots.pictures import plot_error_bars as plot_error_bars
from laplace_sampling.plots.pictures import plot_ood as plot_ood
from laplace_sampling.plots.pictures import plot_reliability as plot_reliability
