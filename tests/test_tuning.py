"""The search: the recipe first, judged by the stopping reward, and a killed one goes on."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from optuna.storages.journal import JournalFileBackend

from rlhf_pipeline import tuning
from rlhf_pipeline.commands import training
from rlhf_pipeline.database import Database
from rlhf_pipeline.errors import RegistryError, TrainingError
from rlhf_pipeline.files import read_json, sqlite_path, write_json
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.registry.ledger import PromotionLedger
from rlhf_pipeline.registry.reproduce import newest_turn
from rlhf_pipeline.reward.settings import FunctionSettings
from rlhf_pipeline.stages import Turn, check_memory
from rlhf_pipeline.tuning import SEARCHED, Search, Trial, search
from tests.assets.world import FirstTurn, Loop


@pytest.fixture
def turn(loop: Loop, first_turn: FirstTurn) -> Turn:
    """Return the shop's turn, whose reward models are real."""
    agent = first_turn.agent_id
    return newest_turn(loop.pipeline.ledger, loop.pipeline.settings(agent), agent)


@pytest.fixture(autouse=True)
def _fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the searches here one plans its memory, which takes as long as all the rest of them."""
    monkeypatch.setattr("rlhf_pipeline.stages.check_memory", lambda *_: None)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """Stand in for training, best at a KL coefficient of 0.02; return the settings that ran."""
    ran: list[Mapping[str, Any]] = []

    def train(_turn: Turn, _folder: Path, settings: PpoSettings, _report: Any) -> dict[str, Any]:
        ran.append({key: getattr(settings, key) for key in SEARCHED})
        return {"score": -abs(settings.kl_coef - 0.02), "kl": 1.0, "chosen_update": 1}

    monkeypatch.setattr(tuning, "_train", train)
    return ran


@pytest.mark.slow
def test_real_trials_are_real_trainings(turn: Turn, tmp_path: Path) -> None:
    found = search(turn, tmp_path, trials=2, updates=2)
    assert [trial.number for trial in found.trials] == [0, 1]
    recipe = {key: getattr(turn.settings.ppo, key) for key in SEARCHED}
    assert found.trials[0].settings == pytest.approx(recipe)
    looks = [json.loads(path.read_text()) for path in tmp_path.glob("*/*/result.json")]
    kept = [
        next(e["stopping_mean"] for e in r["evaluations"] if e["update"] == r["chosen_update"])
        for r in looks
    ]
    assert len(kept) == 2
    assert sorted(t.score or 0.0 for t in found.trials) == pytest.approx(sorted(kept))
    assert (tmp_path / "tuning.png").stat().st_size > 5000
    assert len([*tmp_path.glob("*/*/plots/training.png")]) == 2
    assert not [*tmp_path.rglob("*.safetensors")]  # ten times the model, for nobody
    # Another turn's trials begin with the same settings, and are trainings of their own.
    later = search(replace(turn, fingerprint="1" * 64), tmp_path, trials=1, updates=2)
    assert later.trials[0].failure is None


def test_it_finds_better_settings_and_says_them_as_a_recipe(
    turn: Turn, tmp_path: Path, trained: list[Mapping[str, Any]]
) -> None:
    found = search(turn, tmp_path, trials=25)
    assert len(trained) == 25
    recipe, best = found.trials[0].score, found.best.score
    assert recipe is not None
    assert best is not None
    assert best > recipe
    fragment = yaml.safe_load((tmp_path / "best.yaml").read_text())
    replace(turn.settings.ppo, **fragment["ppo"])  # raises where a setting is out of range
    assert fragment["ppo"]["kl_coef"] == pytest.approx(found.best.settings["kl_coef"], rel=0.01)
    table = json.loads((tmp_path / "trials.json").read_text())
    assert table[0] == asdict(found.trials[0])


@pytest.mark.parametrize("trials", [1, 3])
def test_its_picture_has_few_plain_numbers_and_shows_a_recipe_that_is_the_best(
    trials: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    print_png = FigureCanvasAgg.print_png

    def kept(canvas: FigureCanvasAgg, path: str) -> None:
        drawn.append(canvas.figure)
        print_png(canvas, path)

    monkeypatch.setattr(FigureCanvasAgg, "print_png", kept)
    found = [(3e-5, 0.05, 0.2, 2), (4e-6, 0.006, 0.06, 1), (2e-4, 0.4, 0.4, 6)][:trials]
    settings = [dict(zip(SEARCHED, values, strict=True)) for values in found]
    tuning.draw(
        [Trial(n, chosen, -n, None, None) for n, chosen in enumerate(settings)],
        settings[0],
        tmp_path / "tuning.png",
    )
    (figure,) = drawn
    for axis in figure.axes:
        low, high = axis.get_xlim()
        assert 1 <= sum(low <= tick <= high for tick in axis.get_xticks()) <= 8
        words = [label.get_text() for label in axis.get_xticklabels(which="both")]
        assert [word.replace("\N{MINUS SIGN}", "-") for word in words] == [
            f"{tick:g}" for tick in axis.get_xticks()
        ]
        best, recipe = axis.lines
        assert (best.get_xydata() == recipe.get_xydata()).all()
        assert best.get_fillstyle() == "none"
        assert best.get_markersize() > recipe.get_markersize()
        assert not best.get_clip_on()  # it is the highest, and its ring reaches over the edge
    epochs = figure.axes[SEARCHED.index("epochs")]
    assert all(tick.is_integer() for tick in epochs.get_xticks())
    assert not any(axis.get_legend() for axis in figure.axes)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["best", "recipe"]


def test_searches_that_do_not_compare_share_no_folder(
    turn: Turn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []

    def train(_turn: Turn, folder: Path, settings: PpoSettings, _report: Any) -> dict[str, Any]:
        folders.append(folder.parent)
        return {"score": settings.kl_coef, "kl": 1.0, "chosen_update": 1}

    monkeypatch.setattr(tuning, "_train", train)
    for fingerprint in ("0" * 64, "1" * 64, "0" * 64):
        search(replace(turn, fingerprint=fingerprint), tmp_path, trials=2)
    assert len(folders) == 4  # the first turn's were there already
    assert len(set(folders)) == 2
    # The same votes, trained on again: under other functions, or with other reward models.
    functions = {"length": FunctionSettings()}
    reward = turn.settings.reward.model_copy(update={"functions": functions})
    other = replace(turn, settings=turn.settings.model_copy(update={"reward": reward}))
    search(replace(other, fingerprint="0" * 64), tmp_path, trials=2)
    retrained = replace(turn, work=tmp_path / "again")
    shutil.copytree(turn.work / "reward", retrained.work / "reward")
    for job in ("stopping", "gate"):  # which searches never ask
        settings = retrained.work / "reward" / job / "reward_model.json"
        write_json(settings, {**read_json(settings), "max_completion_tokens": 1})
        search(replace(retrained, fingerprint="0" * 64), tmp_path, trials=2)
    assert len(folders) == 8
    assert len(set(folders)) == 4
    # Or with another model in the folder that a function names.
    taste = tmp_path / "taste"
    functions = {"taste": FunctionSettings(function=str(taste))}
    reward = turn.settings.reward.model_copy(update={"functions": functions})
    other = replace(turn, settings=turn.settings.model_copy(update={"reward": reward}))
    for job in ("stopping", "gate", "gate"):
        shutil.copytree(turn.work / "reward" / job, taste, dirs_exist_ok=True)
        search(other, tmp_path, trials=1)
    assert len(set(folders)) == 6
    assert len(folders) == 10
    # Of a service only where it is decides, not how it is asked: a timeout is raised meanwhile.
    for url, seconds in (
        ("https://[::1]:9/a", 1),
        ("https://[::1]:9/a", 2),
        ("https://[::1]:9/b", 2),
    ):
        functions = {"mine": FunctionSettings(function=url, options={"timeout_seconds": seconds})}
        reward = turn.settings.reward.model_copy(update={"functions": functions})
        other = replace(turn, settings=turn.settings.model_copy(update={"reward": reward}))
        search(other, tmp_path, trials=1)
    assert len(set(folders)) == 8
    assert len(folders) == 12
    # Or with another function of one's own in the file that it is written in.
    monkeypatch.syspath_prepend(tmp_path)
    own = tmp_path / "taste_of_one_who_searches.py"
    functions = {"taste": FunctionSettings(function=f"{own.stem}:taste")}
    reward = turn.settings.reward.model_copy(update={"functions": functions})
    other = replace(turn, settings=turn.settings.model_copy(update={"reward": reward}))
    for number in (1, 2, 2):
        own.write_text(f"def taste(items): return [{number} for _ in items]")
        search(other, tmp_path, trials=1)
    assert len(set(folders)) == 10
    assert len(folders) == 14


def test_a_baseline_that_was_reset_is_searched_against_anew(
    loop: Loop, turn: Turn, tmp_path: Path, trained: list[Mapping[str, Any]]
) -> None:
    """As the next turn will be trained: the reference stays near it, not near that of the day."""
    settings, copy = loop.pipeline.settings(turn.agent_id), tmp_path / "copy.db"
    original = sqlite_path(settings.resolved_database_url)
    assert original is not None
    with closing(sqlite3.connect(original)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    database = Database(f"sqlite:///{copy}")
    ledger = PromotionLedger(database, settings.state_dir)
    ledger.reset_baseline(turn.agent_id, actor="ann", reason="where we want to be")
    now = newest_turn(ledger, settings, turn.agent_id)
    database.close()
    assert now == replace(turn, baseline=turn.champion)
    assert turn.baseline not in (None, turn.champion)
    search(turn, tmp_path / "search", trials=1)
    search(now, tmp_path / "search", trials=1)
    assert len(trained) == 2


def test_a_recipe_at_the_edge_is_searched_around(
    turn: Turn, tmp_path: Path, trained: list[Mapping[str, Any]]
) -> None:
    edges: dict[str, Any] = {"kl_coef": 0.0, "clip_range": 0.45, "epochs": 8}
    edge = replace(turn.settings.ppo, **edges)
    settings = turn.settings.model_copy(update={"ppo": edge})
    found = search(replace(turn, settings=settings), tmp_path, trials=4)
    assert {key: found.trials[0].settings[key] for key in edges} == edges
    assert (tmp_path / "tuning.png").stat().st_size > 5000


def test_a_killed_search_goes_on_where_it_was(
    turn: Turn,
    tmp_path: Path,
    trained: list[Mapping[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search(turn, tmp_path, trials=3)
    stand_in = tuning._train
    asked: list[Mapping[str, Any]] = []

    def killed(_turn: Turn, _folder: Path, settings: PpoSettings, _report: Any) -> dict[str, Any]:
        asked.append({key: getattr(settings, key) for key in SEARCHED})
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "_train", killed)
    with pytest.raises(KeyboardInterrupt):
        search(turn, tmp_path, trials=5)
    monkeypatch.setattr(tuning, "_train", stand_in)
    found = search(turn, tmp_path, trials=5)
    assert len(trained) == len(found.trials) == 5  # three were not trained again
    assert trained[3] == pytest.approx(asked[0])  # and the one that ran begins again, as it was
    search(turn, tmp_path / "whole", trials=5)
    assert trained[:5] == [pytest.approx(settings) for settings in trained[5:]]


def test_the_recipe_is_the_first_trial_wherever_a_search_was_killed(
    turn: Turn,
    tmp_path: Path,
    trained: list[Mapping[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "draw", lambda *_: None)
    append, left, kills = JournalFileBackend.append_logs, 0, 0

    def killed_in_the_end(journal: JournalFileBackend, logs: list[dict[str, Any]]) -> None:
        nonlocal left, kills
        if left == 0:
            kills += 1
            raise KeyboardInterrupt
        left -= 1
        append(journal, logs)

    recipe = {key: getattr(turn.settings.ppo, key) for key in SEARCHED}
    for writes in range(1, 30):
        folder = tmp_path / str(writes)
        monkeypatch.setattr(JournalFileBackend, "append_logs", killed_in_the_end)
        kills = 0
        for given in (6, writes):  # as it asks for the recipe's settings, and as it goes on
            left = given
            with suppress(KeyboardInterrupt):
                search(turn, folder, trials=1)
        monkeypatch.setattr(JournalFileBackend, "append_logs", append)
        found = search(turn, folder, trials=1)
        assert [trial.settings for trial in found.trials] == [recipe] == [found.recipe]
        if kills == 1:
            break
    assert kills == 1  # each write has been the last


def test_a_search_cut_off_in_any_line_of_its_journal_ends_as_a_whole_one(
    turn: Turn,
    tmp_path: Path,
    trained: list[Mapping[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of it written, by a kill or on a full disk, and the lock to write it still held."""
    monkeypatch.setattr(tuning, "draw", lambda *_: None)
    whole = search(turn, tmp_path / "whole", trials=2)
    append, left = JournalFileBackend.append_logs, 0

    def cut_off(journal: JournalFileBackend, logs: list[dict[str, Any]]) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            return append(journal, logs)
        written = Path(journal._file_path)
        with written.open("a") as lines:
            lines.write(json.dumps(logs[0])[:9])
        written.with_name("journal.log.lock").symlink_to("/gone/journal.log")
        raise KeyboardInterrupt

    writes = len((tmp_path / "whole" / "journal.log").read_text().splitlines())
    for n in range(writes):
        left = n
        monkeypatch.setattr(JournalFileBackend, "append_logs", cut_off)
        with pytest.raises(KeyboardInterrupt):
            search(turn, tmp_path / str(n), trials=2)
        monkeypatch.setattr(JournalFileBackend, "append_logs", append)
        found = search(turn, tmp_path / str(n), trials=2)
        assert replace(found, folder=whole.folder) == whole


def test_its_table_names_the_recipe_by_its_settings_and_says_failures_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    recipe, other = (dict.fromkeys(SEARCHED, value) for value in (0.1, 0.2))
    trials = (
        Trial(0, other, None, None, None, "found none [x] [red]"),
        Trial(1, recipe, 0.5, 1.0, 2),
    )
    (tmp_path / "best.yaml").write_text("ppo:\n")
    training._print(Search(trials, recipe, tmp_path))
    told = capsys.readouterr().out
    assert "found none [x] [red]" in told
    (named,) = [line for line in told.splitlines() if "(recipe)" in line]
    assert "1 (recipe)" in named


def test_a_second_search_beside_one_at_work_is_refused(
    turn: Turn,
    tmp_path: Path,
    trained: list[Mapping[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in, refused = tuning._train, []

    def begins_another(*given: Any) -> dict[str, Any]:
        with pytest.raises(TrainingError, match="found another at work; wait for it") as told:
            search(turn, tmp_path, trials=2)
        refused.append(told.value)
        return stand_in(*given)

    monkeypatch.setattr(tuning, "_train", begins_another)
    found = search(turn, tmp_path, trials=2)
    assert len(refused) == len(trained) == 2
    assert [trial.failure for trial in found.trials] == [None, None]


def test_a_search_goes_on_with_other_settings_of_the_machine(
    turn: Turn, tmp_path: Path, trained: list[Mapping[str, Any]]
) -> None:
    search(turn, tmp_path, trials=2)
    ppo = replace(turn.settings.ppo, tokens_per_microbatch=500, completions_at_once=8)
    less = replace(turn, settings=turn.settings.model_copy(update={"ppo": ppo}))
    assert len(search(less, tmp_path, trials=3).trials) == len(trained) == 3


def test_what_memory_does_not_suffice_for_is_refused_before_the_first_trial(
    turn: Turn,
    tmp_path: Path,
    trained: list[Mapping[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlhf_pipeline.stages.check_memory", check_memory)
    monkeypatch.setattr("rlhf_pipeline.ppo.plan.memory_found", lambda device: 2**20)
    with pytest.raises(TrainingError, match="training needs about"):
        search(turn, tmp_path, trials=2)
    assert trained == []


def test_a_trial_that_cannot_be_trained_is_told_and_does_not_win(
    turn: Turn, tmp_path: Path, trained: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tuning._train

    def fails(given: Turn, folder: Path, settings: PpoSettings, report: Any) -> dict[str, Any]:
        write_json(folder / "policy" / "config.json", {})
        write_json(folder / "checkpoints" / "update-000001" / "state.json", {})
        write_json(folder / "result.json", {})
        if len(trained) == 1:
            trained.append({})
            raise TrainingError("the loss is not finite")
        return stand_in(given, folder, settings, report)

    monkeypatch.setattr(tuning, "_train", fails)
    found = search(turn, tmp_path, trials=4)
    assert [trial.failure for trial in found.trials].count("the loss is not finite") == 1
    left = {path.name for path in tmp_path.glob("*/*/*")}
    assert left == {"result.json"}  # of an ended trial, whichever way, no weights stay
    assert found.best.score is not None


def test_a_trial_that_failed_as_its_search_was_killed_counts_once(
    turn: Turn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[float] = []

    def fails(_turn: Turn, _folder: Path, settings: PpoSettings, _report: Any) -> dict[str, Any]:
        ran.append(settings.learning_rate)
        if len(ran) == 1:
            raise TrainingError("the loss is not finite")
        return {"score": 0.5, "kl": 1.0, "chosen_update": 1}

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "_train", fails)
    with monkeypatch.context() as patched:
        patched.setattr(optuna.Study, "tell", killed)  # why it failed is written down before
        with pytest.raises(KeyboardInterrupt):
            search(turn, tmp_path, trials=3)
    found = search(turn, tmp_path, trials=3)
    assert [trial.failure for trial in found.trials] == ["the loss is not finite", None, None]
    assert len(set(ran)) == 3  # the same settings were not tried again


def test_what_cannot_be_searched_is_refused(turn: Turn, tmp_path: Path, loop: Loop) -> None:
    ppo = replace(turn.settings.ppo, estimator="dpo")
    other = replace(turn, settings=turn.settings.model_copy(update={"ppo": ppo}))
    with pytest.raises(TrainingError, match="set gae or rloo"):
        search(other, tmp_path, trials=1)
    with pytest.raises(RegistryError, match="needed a turn of agent nobody"):
        newest_turn(loop.pipeline.ledger, loop.pipeline.settings(), "nobody")
