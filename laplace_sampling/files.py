"""Posteriors as states, which are nested dictionaries of tensors and plain values, and states in files.

`torch.load(..., weights_only=True)` reads such a file. The old file stays until the new one is whole.
"""

import os
import secrets
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from laplace_sampling.data.batches import as_plain
from laplace_sampling.likelihoods.as_likelihood import likelihood_from_recipe, recipe_of_likelihood
from laplace_sampling.linear_model.priors.as_prior import prior_from_recipe, recipe_of_prior
from laplace_sampling.methods import method_from_recipe, recipe_of_method
from laplace_sampling.networks.filters import FilterNetwork
from laplace_sampling.networks.last_layer import LastLayer
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.posterior import Posterior
from laplace_sampling.predictions.novelty import Novelty
from laplace_sampling.settings import Settings

# A path, or an open file in binary mode.
File = str | os.PathLike[str] | IO[bytes]

_FORMAT = 6
# Settings of which a change would draw other samples of a closed form.
_PLAIN = ("num_samples", "seed", "linear_model")


def state_of(
    posterior: Posterior, settings: Settings, network: Linearisation, novelty: Novelty | None = None
) -> dict[str, Any]:
    """The state of a posterior, whose tensors are copies."""
    state = {
        "format": _FORMAT,
        "settings": {
            "likelihood": recipe_of_likelihood(settings.likelihood),
            "prior": recipe_of_prior(settings.prior),
            "method": recipe_of_method(settings.method),
            **{name: getattr(settings, name) for name in _PLAIN},
        },
        "network": {
            "parameters": network.selection,
            "last_layer": isinstance(network, LastLayer) and not network.named,
            "lacking": network.lacking,
            "observed": settings.observation is not None,
        },
        "posterior": posterior.state(),
        "novelty": None if novelty is None else novelty.state(),
    }
    return tree_map_only(Tensor, lambda tensor: as_plain(tensor.detach()).clone(), state)


def posterior_of(
    state: dict[str, Any], settings: Settings, network: Linearisation, call: str, of_this_network: bool = True
) -> tuple[Posterior, Settings]:
    """The posterior of a state, and the settings with the linear model and the seed of its samples.

    Args:
        state: from `state_of`.
        settings: of the object that takes it over.
        network: whose posterior it must be.
        call: what the user called.
        of_this_network: whether it must be of the weights that the network has now.

    Raises:
        ValueError: if the state is damaged or incomplete, is of other weights, of another function of
            the data, of other random parameters or another likelihood.
    """
    _check_format(state)
    with _complete():
        saved, there = state["settings"], state["network"]
        selection, lacking = there["parameters"], there["lacking"]
        if isinstance(network, LastLayer):
            network.take_over(selection)
        _check_selection(selection, network.selection)
        _check_likelihood(saved["likelihood"], there["observed"], settings)
        posterior = Posterior.of_state(state["posterior"], settings.likelihood, settings.method, network.device)
        if posterior.samples.shape[1:] != (network.num_parameters,):
            raise KeyError("samples")
        _take_filters(posterior, network)
        settings = replace(settings, **{name: saved[name] for name in _PLAIN})
    if lacking is not None:  # a wrong derivative is found at a fit only
        network.take_two_pullbacks(lacking)
    if of_this_network:
        posterior.check_weights(network, call)
        posterior.check_function(network, call)
    return posterior, settings


def novelty_of_state(state: dict[str, Any], network: Linearisation) -> Novelty | None:
    """What tells novelty, if the state has it."""
    with _complete():
        found = state["novelty"]
        return None if found is None else Novelty.of_state(found, network.device)


def arguments_of(state: dict[str, Any], **given: Any) -> dict[str, Any]:
    """Arguments for the constructor, so that a loaded object fits again as the saved one would.

    Args:
        state: from `state_of`.
        given: `likelihood`, `prior` and `method` in place of those that were saved; `None` for these.
    """
    _check_format(state)
    of_recipe = {"likelihood": likelihood_from_recipe, "prior": prior_from_recipe, "method": method_from_recipe}
    with _complete():
        arguments, there = {name: state["settings"][name] for name in (*of_recipe, *_PLAIN)}, state["network"]
        selection = "last_layer" if there["last_layer"] else there["parameters"]
    for name, make in of_recipe.items():
        arguments[name] = make(arguments[name]) if given[name] is None else given[name]
    return arguments | {"parameters": selection}


def _check_format(state: Any) -> None:
    if not isinstance(state, dict) or not isinstance(found := state.get("format"), int):
        raise ValueError(
            "This is not a state of a LinearisedLaplace, or one of an old version: it has no entry 'format'."
        )
    if found != _FORMAT:
        what = "a newer version wrote it, so update laplace_sampling" if found > _FORMAT else "an older one wrote it"
        raise ValueError(f"The state has format {found}, but this version reads format {_FORMAT}: {what}.")


@contextmanager
def _complete() -> Iterator[None]:
    """One sentence for a state that lacks something, or has something else in its place."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"The state is incomplete or damaged ({error}). Take another copy of it, or fit and save again."
        ) from error


def _check_selection(saved: Any, selection: Any) -> None:
    if saved == selection:
        return
    saved_names, names = list(saved), list(selection)
    which = "the same, but of other elements" if saved_names == names else _first_of(names)
    raise ValueError(
        f"The state is of {len(saved_names)} random parameters, {_first_of(saved_names)}, but this LinearisedLaplace "
        f"has {len(names)}, {which}. Give the same `parameters=`."
    )


def _take_filters(posterior: Posterior, network: Linearisation) -> None:
    """Bring a network into the coordinates of the samples."""
    blocks = {name: lengthscale for name, (_, lengthscale) in posterior.prior.blocks.items()}
    own = set(network.layers()[0]) if isinstance(network, FilterNetwork) else set()
    if blocks and blocks.keys() != own:
        raise ValueError(
            f"The state is of a `FilterwisePrior` with the blocks {list(blocks)}: give that prior, with the same "
            "`blocks`, as `prior=`."
        )
    if isinstance(network, FilterNetwork):
        network.take(blocks)


def _first_of(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _check_likelihood(saved: dict[str, Any], observed: bool, settings: Settings) -> None:
    own = recipe_of_likelihood(settings.likelihood)
    if any(saved[part] != own[part] for part in ("name", "class")):
        kinds = [f"{recipe['name']!r} ({recipe['class']})" for recipe in (saved, own)]
        raise ValueError(f"The state is of likelihood {kinds[0]}, but this LinearisedLaplace has {kinds[1]}.")
    if observed != (settings.observation is not None):
        raise ValueError(
            f"The posterior was {'' if observed else 'not '}fitted to measurements `y = T f(x) + noise`: "
            f"{'give T as `likelihood=Gaussian(observe=T)`' if observed else 'leave out `observe`'}."
        )


def write(state: dict[str, Any], file: File) -> None:
    """Write a state to a file, all of it or nothing; an open file is written to as it is.

    It goes to a temporary file in the same folder, is flushed to the disk, and takes the place of the old file, with
    its permissions. A symbolic link stays, and what it points to is replaced.

    Raises:
        OSError: if that is not possible; the old file is still there, and the temporary one is not.
    """
    if hasattr(file, "write"):
        _save(state, cast(IO[bytes], file))
        return
    target = target_of(cast(str, file))
    temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(4)}.tmp")  # names have 255 bytes at most
    check_target(target, "save")
    try:
        with open(temporary, "xb") as opened:
            _save(state, opened)
            opened.flush()
            os.fsync(opened.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        before = " The file that was there before is unchanged." if target.is_file() else ""
        raise explained(error, f"`save`: {target} cannot be written: {error.strerror}.{before}") from error
    with suppress(OSError):  # not every system lets one flush a folder
        _flush_folder(target.parent)


def read(file: File) -> Any:
    """Read what `write` wrote: nested dictionaries and lists of tensors on the CPU and of plain values.

    Raises:
        OSError: if the file cannot be opened.
        ValueError: if it is damaged, or of something else.
    """
    if hasattr(file, "read"):
        return _load(cast(IO[bytes], file), "The open file")
    path = os.fsdecode(cast(str, file))
    try:
        with open(path, "rb") as opened:
            return _load(opened, f"{path}, of {os.fstat(opened.fileno()).st_size} bytes,")
    except OSError as error:
        raise explained(error, f"`load`: {path} cannot be read: {error.strerror}.") from error


def target_of(path: str | os.PathLike[str]) -> Path:
    """The file that a path, or a symbolic link there, stands for."""
    return Path(os.path.realpath(os.fsdecode(path)))


def check_target(target: Path, call: str) -> None:
    """Raise an `OSError` if nothing may be put in the place of a file; `call` is what the user called."""
    if target.is_dir():
        error = IsADirectoryError(0, "it is a folder; give the name of a file in it")
    elif not target.parent.is_dir():
        error = FileNotFoundError(0, f"there is no folder {target.parent}; make it first")
    elif target.exists() and not target.is_file():
        error = OSError(0, "it is a device or a pipe; open it, and pass the open file")
    elif target.exists() and not os.access(target, os.W_OK):
        error = PermissionError(0, "it is write-protected")
    else:
        return
    raise explained(error, f"`{call}`: {target} cannot be written: {error.strerror}.")


def _save(state: dict[str, Any], file: IO[bytes]) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:  # torch raises one of its own after that of the file
        raise error.__context__ or error from None


def _load(file: IO[bytes], name: str) -> Any:
    try:
        loaded = load_checked(file, map_location="cpu")
    except Exception as error:  # of zip files, of pickles, of memory: a damaged file may look like anything
        raise ValueError(
            f"`load`: {name} is damaged, cut off, or no file of `save` (which holds plain tensors and values only). "
            "Take another copy of it, or fit and save again."
        ) from error
    return tree_map_only(Tensor, as_plain, loaded)


def load_checked(file: IO[bytes], **options: Any) -> Any:
    """What `torch.save` wrote to a file, after a look at the checksums of its archive, which torch does not take."""
    start = file.tell()
    with zipfile.ZipFile(file) as archive:
        if archive.testzip() is not None:
            raise zipfile.BadZipFile
    file.seek(start)
    return torch.load(file, weights_only=True, **options)


def explained(error: OSError, sentence: str) -> OSError:
    """An error of the same kind with a sentence."""
    explained = type(error)(sentence)
    explained.errno = error.errno
    return explained


def _flush_folder(folder: Path) -> None:
    """Write the new name of a file to the disk, too."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
