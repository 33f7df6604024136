"""What a stage's bar says where nobody watches."""

from io import StringIO

from rich.console import Console

from automation.bars import Bars


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
