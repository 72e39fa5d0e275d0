"""`SavableModel`: what `save` writes and `load` reads."""

from typing import Any, Self

from torch import nn

from laplace_sampling.files import File, arguments_of, posterior_of, read, state_of, write
from laplace_sampling.fitted import Fitted, FittedModel
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.priors.prior import Prior
from laplace_sampling.methods.method import Method
from laplace_sampling.preparation import restore_fit


class SavableModel(FittedModel):
    """A fitted model that can be written to a file, and read."""

    def state_dict(self, *, include_data: bool = True) -> dict[str, Any]:
        """All that predictions need, as nested dictionaries of tensors and plain values.

        `torch.save` writes it, and `torch.load(..., weights_only=True)` reads it.

        Of the data it holds

        - the inputs of at most four training data, by which `load` sees whether a network computes what it did at the
          fit, and `to_module` traces it;
        - after an exact fit in observation space all training data, inputs, targets and their weights or noise
          variances, of which its covariances are made;
        - after `calibrate_conformal` the scores of its data, a number for each target, without inputs and targets.

        All else is made of sums over the data.

        Args:
            include_data: with `False` it holds no inputs and targets. Then a network with the weights of the fit that
                computes something else, as with another activation, is not refused; `to_module` needs `example=`; and
                variances and covariances of an exact fit in observation space are those of its samples, which have a
                relative error of `√(2/K)`, and its `sample`, evidence and leave-one-out need another fit.
        """
        return self._state(include_data, "state_dict")

    def _state(self, include_data: bool, call: str) -> dict[str, Any]:
        posterior = self._require(call).posterior
        if posterior.curvature is None:
            posterior = self._drawn(call).posterior
        if not include_data:
            posterior = posterior.without_data()
        return state_of(posterior, self.settings, self.network)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a posterior from `state_dict`.

        Raises:
            ValueError: if the state is damaged or incomplete, of a network with other weights or another function, of
                another likelihood or another choice of parameters; what was fitted before is kept.
        """
        self._take_over(state, "load_state_dict")

    def _take_over(self, state: dict[str, Any], call: str) -> None:
        network = self.network.renewed()
        posterior, settings = posterior_of(state, self.settings, network, call)
        fit, tangent = restore_fit(settings, network, posterior)
        self.settings, self.network, self._unfinished = settings, network, ()
        self._keep(posterior, fit, tangent)

    def start_from(self, state: dict[str, Any]) -> None:
        """Take over a posterior of the network as it was earlier in its training, for `warm_start=True` to start from.

        Nothing is predicted before the next fit, unless the network has the weights of that posterior.

        Args:
            state: from `state_dict`, whatever the weights of the network were then.

        Raises:
            ValueError: if the state is damaged or incomplete, of another likelihood or another choice of parameters.
        """
        posterior, self.settings = posterior_of(state, self.settings, self.network, "start_from", of_this_network=False)
        self._fitted, self._unfinished = Fitted(posterior, of_earlier_weights=True), ()

    def save(self, path: File, *, include_data: bool = True) -> None:
        """Write `state_dict()` to a file, which holds the inputs of a few training data, or all data: see there.

        It is written to a temporary file in the same folder, flushed to the disk, and put in the place of an older
        file: whatever happens meanwhile, that one or the new one is there, and whole. A process that is killed may
        leave the temporary file behind, which begins with a dot and ends in `.tmp`.

        Args:
            path: of the file; or an open file in binary mode, which is written to as it is.
            include_data: with `False` the file holds no inputs and targets, and less can be done with it, as there.

        Raises:
            NotFittedError: before a fit.
            OSError: if the file cannot be written; an older one is unchanged.
        """
        write(self._state(include_data, "save"), path)

    @classmethod
    def load(
        cls,
        path: File,
        model: nn.Module,
        likelihood: str | Likelihood | None = None,
        prior: str | Prior | None = None,
        method: str | Method | None = None,
        *,
        process_group: Any = None,
    ) -> Self:
        """Read what `save` wrote, for the same trained network; settings are those of the saved object.

        Args:
            path: of the file, or an open file in binary mode.
            model: the network, with the weights that it had at the fit.
            likelihood: needed only if the file does not hold it: if it was not one of the library's own, or one of
                measurements, `Gaussian(observe=T)`.
            prior: likewise.
            method: likewise.
            process_group: as of the constructor, whatever the number of processes was that saved it.

        Raises:
            OSError: if the file cannot be opened.
            ValueError: if it is damaged, of something else or of another version; if `model` has other weights than at
                the fit, or computes another function of the data; if something has to be given.
        """
        state = read(path)
        arguments = arguments_of(state, likelihood=likelihood, prior=prior, method=method)
        # The constructor is that of `LinearisedLaplace`.
        la = cls(model, **arguments, process_group=process_group)  # pyright: ignore[reportCallIssue]
        la._take_over(state, "load")
        return la
