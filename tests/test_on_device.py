"""Training, rewards and the service on a device that is not the CPU: the same numbers come out.

Where there is no GPU a pretended one stands in (pretended.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.on_device import CASES

pytestmark = pytest.mark.slow  # half a minute where the device is pretended


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what `python -m tests.on_device` prints."""
    folder = tmp_path_factory.mktemp("on_device")
    command = [sys.executable, "-m", "tests.on_device", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "without" not in run.stderr, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def test_tensors_of_two_places_do_not_meet(told: dict[str, Any]) -> None:
    assert told["refused"] == ["sum", "place in a row", "joined", "in place", "array"]


def test_decoding_there_is_captured(told: dict[str, Any]) -> None:
    assert told["graphs"][0] > 10


@pytest.mark.parametrize("case", CASES)
def test_a_device_computes_what_the_cpu_does(told: dict[str, Any], case: str) -> None:
    on_cpu, on_device = told[case]
    if isinstance(on_cpu[0], str):
        assert on_device == on_cpu
    elif case == "reward model" and torch.cuda.is_available():
        # What a GPU trains a reward with, bfloat16 under autocast, has two digits.
        assert on_device == pytest.approx(on_cpu, rel=2e-2, abs=5e-2)
    else:
        assert on_device == pytest.approx(on_cpu, rel=2e-3, abs=1e-4)
