"""What a stage's bar says where nobody watches."""

import time
from io import StringIO
from pathlib import Path

from rich.console import Console

from automation.bars import Bars, looking


def test_a_log_hears_of_every_stage_as_it_begins() -> None:
    told = StringIO()
    bars = Bars(Console(file=told))
    bars.show("ppo", {"update": 1, "of": 40})
    bars.show("ppo", {"update": 2, "of": 40})
    bars.show("evaluation", {"done": 0})
    assert told.getvalue() == "after 0 s: ppo\nafter 0 s: evaluation\n"


def test_a_terminal_has_the_bar_alone() -> None:
    told = StringIO()
    Bars(Console(file=told, force_terminal=True)).show("ppo", {"update": 1})
    assert "after" not in told.getvalue()


def test_what_an_earlier_attempt_reported_is_not_said_of_one_that_goes_on(tmp_path: Path) -> None:
    told = StringIO()
    bars = Bars(Console(file=told))
    for stage in ("reward", "ppo"):
        (tmp_path / f"{stage}.progress.jsonl").write_text('{"update": 4, "of": 9}\n')
    with looking(bars, tmp_path):
        with (tmp_path / "ppo.progress.jsonl").open("a") as reported:
            reported.write('{"update": 5, "of": 9}\n')
        deadline = time.monotonic() + 30
        while not told.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert told.getvalue().endswith(" s: ppo\n")
    assert "reward" not in told.getvalue()
