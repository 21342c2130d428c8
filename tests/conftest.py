"""Shared fixtures: determinism, and no worker left behind."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest
import torch

from tests.ranks import close_all


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _workers() -> Iterator[None]:
    yield
    close_all()
