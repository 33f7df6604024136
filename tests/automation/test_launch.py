"""`make train AGENT=name` where no turn comes of it: a line says why and what to do."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from automation import processes
from rlhf_pipeline.config import load_settings
from rlhf_pipeline.database import open_database
from rlhf_pipeline.feedback.claims import ClaimBook
from rlhf_pipeline.feedback.ingest import ingest
from rlhf_pipeline.feedback.store import FeedbackStore

VOTE = '{"kind": "thumbs", "prompt": "Why?", "completion": "So.", "value": "up", "rater": "ann"}\n'


@pytest.mark.slow  # two processes that load everything
def test_a_turn_that_cannot_be_says_so_in_a_line(tmp_path: Path) -> None:
    state = tmp_path / "state"
    settings = load_settings(None, {"state_dir": str(state)})
    database = open_database(settings.resolved_database_url)
    votes = tmp_path / "votes.jsonl"
    votes.write_text(VOTE + VOTE.replace("Why?", "Where?"))
    ingest(FeedbackStore(database), votes, "tea")

    few = train("tea", state)
    assert "needed 10 votes that keep every rule, found 2; collect more" in few
    assert "validation.min_rows; see `make ui`\n" in few  # no stage began: there is no folder

    claims = ClaimBook(database)
    told = claims.history("tea")[-1].reason or ""  # as `rlhf status` says
    assert "failed: enough_rows_are_clean: needed 10 votes that keep every rule, found 2" in told
    claims.claim(
        "tea", "f" * 64, 2, holder="another", asked_by="sensor", lease=timedelta(minutes=5)
    )
    assert "agent 'tea' is being trained by run another" in train("tea", state)
    database.close()


def train(agent: str, state: Path) -> str:
    """Return what a refused `make train` printed, which is a line."""
    done = subprocess.run(
        [sys.executable, "-m", "automation.launch", "--agent", agent],
        cwd=processes.ROOT,
        env={**os.environ, "RLHF_STATE_DIR": str(state)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Stack Trace" not in done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stderr.split("\n") if line] == ["error"]
    return done.stderr
