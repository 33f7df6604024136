"""Fixtures of the PPO tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.ppo.world import save_absolute, save_base


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small are slower on two threads, and sums differ between thread counts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny policy every run starts from; nobody writes to it."""
    return save_base(tmp_path_factory.mktemp("base") / "policy")


@pytest.fixture(scope="session")
def absolute(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny policy with absolute positions."""
    return save_absolute(tmp_path_factory.mktemp("absolute") / "policy")
