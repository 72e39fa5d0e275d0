from collections.abc import Callable

import pytest

from laplace_sampling.methods import closed_form


@pytest.fixture
def in_weight_space(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function that makes the exact method work in weight space from then on."""
    return lambda: monkeypatch.setattr(closed_form, "space_of", lambda problem: "weights")
