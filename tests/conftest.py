"""Settings of all tests: one torch thread per xdist worker, a fixed seed, no compiled code left behind."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

SEED = 0

settings.register_profile("gnmr", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("gnmr")


def pytest_configure() -> None:
    """Under xdist the workers share the cores: with more than one thread each they slow one another down."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Start every test from the same random state, whatever ran before it."""
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _reset_dynamo() -> Iterator[None]:
    """Drop compiled code after each test, so that none depends on another (well under a millisecond)."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
