import pytest
import torch
from cases import CASES, Case, make_case


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
