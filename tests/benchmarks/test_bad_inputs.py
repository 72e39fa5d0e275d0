"""A tenth of the bad inputs of the standing trial: each ends in a sentence, and changes no model."""

import zlib

import pytest

from benchmarks.trial.bad_inputs import BAD_INPUTS, check

# By a hash of the name, so that a case stays in or out when others are added.
TENTH = [name for name in BAD_INPUTS if zlib.crc32(name.encode()) % 10 == 0]


def test_there_are_enough() -> None:
    assert len(BAD_INPUTS) >= 300
    assert len(TENTH) >= 60


@pytest.mark.parametrize("name", TENTH)
def test_a_bad_input_ends_in_a_sentence(name: str) -> None:
    assert check(name) is None
