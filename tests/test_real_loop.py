"""Real preference data through the whole path: `rlhf ingest`, then the turn a person asks for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("RLHF_SHARED_DATA", ROOT.parent / "shared" / "data"))
HELPFUL = SHARED / "hh_rlhf" / "helpful-base.test.jsonl.gz"


def run(*command: str, state: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, "RLHF_STATE_DIR": str(state), "RLHF_RECIPE": "tiny"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.data
def test_helpful_base_goes_from_file_to_verdict(tmp_path: Path) -> None:
    if not HELPFUL.exists():
        pytest.skip(f"needs the shared feedback data; nothing at {HELPFUL}")
    taken = run("rlhf_pipeline.cli", "ingest", str(HELPFUL), "--agent", "hh", state=tmp_path)
    assert taken.returncode == 0, taken.stderr
    turn = run("automation.launch", "--agent", "hh", state=tmp_path)
    assert turn.returncode == 0, turn.stdout + turn.stderr
    said = turn.stdout
    for rule, count in (("identical_pair", 2), ("contexts_differ", 9), ("empty_completion", 4)):
        assert f"quarantine: {rule} {count}\n" in said
    said_of = r"proxy reward model: accuracy 0\.\d+ .* always (longer|shorter): 0\.\d+"
    assert re.search(said_of, said)
    assert "verdict: " in said
    print(said)  # noqa: T201 - the accuracy beside its floors is what a person wants to read
