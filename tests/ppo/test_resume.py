"""A run that is killed and called again ends with the weights of one that was not."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_pipeline.ppo import checkpoint
from rlhf_pipeline.ppo.result import TrainingResult
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.records import Prompt, RewardInput
from rlhf_pipeline.reward.settings import Linear, weight_at
from tests.ppo.world import PROMPTS, changed, lower_share, train, two_pieces, weights_of

# Everything that moves must move here: coefficient, moments, optimizer, cursor, random states.
SETTINGS = changed(
    updates=4,
    checkpoint_every=2,
    evaluate_every=2,
    kl_controller="adaptive",
    kl_horizon=100,
    score_normalisation="running",
)

CRITERIA = "checkpoints/update-000004/criteria.safetensors"


class Interrupted(Exception):
    """What a test raises where a real run would be killed."""


def interrupted_after(calls: int) -> Callable[[Sequence[RewardInput]], list[float]]:
    """Return a reward that ends the run at its n-th call for rollouts."""
    called = itertools.count(1)

    def reward(items: Sequence[RewardInput], /) -> list[float]:
        if len(items) == SETTINGS.rollouts_per_update and next(called) == calls:
            raise Interrupted
        return lower_share(items)

    return reward


def without_clocks(result: TrainingResult) -> dict[str, Any]:
    """Return all of a result that does not depend on time or place, NaN-free and comparable."""
    facts = asdict(result)
    for name in ("seconds", "resumed_from", "model_path", "settings", "fingerprint"):
        facts.pop(name)
    facts["history"] = [
        {k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))}
        for row in facts["history"]
    ]
    return facts


def assert_same_run(one: tuple[TrainingResult, Path], other: tuple[TrainingResult, Path]) -> None:
    assert without_clocks(one[0]) == without_clocks(other[0])
    weights, others = weights_of(one[1] / "policy"), weights_of(other[1] / "policy")
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name


def test_a_killed_run_ends_with_the_weights_of_an_uninterrupted_one(
    base: Path, tmp_path: Path, warmed: list[str]
) -> None:
    words = ["-m", "tests.ppo.killed", str(base), str(tmp_path / "killed")]
    killed = subprocess.run([*warmed, *words], capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    assert not (tmp_path / "killed/result.json").exists()
    whole = train(base, tmp_path / "whole", SETTINGS)
    resumed = train(base, tmp_path / "killed", SETTINGS)
    assert (whole.resumed_from, resumed.resumed_from) == (None, 2)
    assert_same_run((whole, tmp_path / "whole"), (resumed, tmp_path / "killed"))
    assert all(math.isfinite(x) for x in resumed.loss_history)


def kill_at_random(
    python: list[str], base: Path, folder: Path, kills: int, seed: int
) -> dict[str, int]:
    """Kill runs at random instants, five times each; every one must end as the whole one did."""
    words = ["-m", "tests.ppo.kills", str(base), str(folder), str(kills), str(seed)]
    root = Path(__file__).parents[2]
    told = subprocess.run([*python, *words], cwd=root, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    whole = TrainingResult.load(folder / "whole/result.json"), folder / "whole"
    counts: dict[str, int] = json.loads(told.stdout.splitlines()[-1])
    for run in range(counts["runs"]):
        killed = folder / f"killed-{run}"
        assert_same_run(whole, (TrainingResult.load(killed / "result.json"), killed))
        left = [*killed.glob(".*"), *killed.glob("checkpoints/.*")]
        assert not left, left  # half-written by an attempt that was killed
    assert counts["between"] + counts["in_a_save"] == kills
    return counts


def test_kills_at_random_instants_change_nothing(
    base: Path, tmp_path: Path, warmed: list[str]
) -> None:
    kill_at_random(warmed, base, tmp_path, 5, seed=0)


@pytest.mark.slow
def test_fifty_kills_change_nothing(base: Path, tmp_path: Path, warmed: list[str]) -> None:
    kill_at_random(warmed, base, tmp_path, 50, seed=1)  # how many hit a save is the clock's


def interrupt_and_compare(base: Path, folder: Path, settings: PpoSettings, calls: int) -> None:
    with pytest.raises(Interrupted):
        train(base, folder / "cut", settings, reward=interrupted_after(calls))
    resumed = train(base, folder / "cut", settings)
    whole = train(base, folder / "whole", settings)
    assert resumed.resumed_from is not None
    assert_same_run((whole, folder / "whole"), (resumed, folder / "cut"))


def test_an_interruption_after_every_kind_of_checkpoint_changes_nothing(
    base: Path, tmp_path: Path
) -> None:
    settings = changed(
        updates=3, critic="separate", checkpoint_every=1, evaluate_every=3, score_clip=1.0
    )
    interrupt_and_compare(base, tmp_path, settings, 3)


def test_a_damaged_checkpoint_costs_updates_and_changes_nothing(base: Path, tmp_path: Path) -> None:
    settings = changed(updates=3, evaluate_every=3)
    with pytest.raises(Interrupted):
        train(base, tmp_path / "cut", settings, reward=interrupted_after(3))
    (tmp_path / "cut/checkpoints/update-000002/optimizer.safetensors").write_bytes(b"?")
    with pytest.warns(UserWarning, match="update 2 is damaged"):
        resumed = train(base, tmp_path / "cut", settings)
    whole = train(base, tmp_path / "whole", settings)
    assert resumed.resumed_from == 1
    assert_same_run((whole, tmp_path / "whole"), (resumed, tmp_path / "cut"))


@pytest.mark.filterwarnings("ignore:checkpoint of update")  # both are damaged, as they should be
def test_checkpoints_that_are_damaged_take_no_place_of_later_ones(
    base: Path, tmp_path: Path
) -> None:
    settings = changed(updates=6, evaluate_every=6)

    def until(update: int) -> list[int]:
        """Run until this update is made, before its checkpoint; return the updates kept."""

        def report(facts: Mapping[str, float | int | str]) -> None:
            if facts["update"] == update:
                raise Interrupted

        with pytest.raises(Interrupted):
            train(base, tmp_path, settings, report=report)
        return checkpoint.checkpoint_updates(tmp_path / "checkpoints")

    assert until(6) == [0, 4, 5]
    for update in (4, 5):
        (tmp_path / f"checkpoints/update-{update:06d}/policy.safetensors").write_bytes(b"?")
    assert until(4) == [0, 2, 3]


def test_a_composite_resumes_with_its_weights_and_scales(base: Path, tmp_path: Path) -> None:
    settings = changed(updates=4, evaluate_every=2)

    def stop() -> None:
        if len(list((tmp_path / "cut/checkpoints").glob("update-*3"))):
            raise Interrupted

    with pytest.raises(Interrupted):
        train(base, tmp_path / "cut", settings, reward=two_pieces(), keep_going=stop)
    resumed = train(base, tmp_path / "cut", settings, reward=two_pieces())
    used = two_pieces()
    used.begin_update(9)
    used([RewardInput(PROMPTS[0], "what was scored before the run is no part of it")])
    used.end_update(list)
    whole = train(base, tmp_path / "whole", settings, reward=used)
    assert resumed.resumed_from == 3
    assert_same_run((whole, tmp_path / "whole"), (resumed, tmp_path / "cut"))
    heads = [load_file(tmp_path / run / CRITERIA) for run in ("cut", "whole")]
    assert all(torch.equal(tensor, heads[1][name]) for name, tensor in heads[0].items())
    weights = [row["reward/lower/weight"] for row in whole.history]
    assert weights == [weight_at(Linear(start=1.0, end=0.2, updates=3), n) for n in range(4)]
    added = [row["reward/lower/added_mean"] for row in whole.history]
    assert added[0] != pytest.approx(whole.history[0]["reward/lower/score_mean"])  # scaled at once
    for row, share in zip(whole.history, added, strict=True):
        assert row["rollout/score_mean"] == pytest.approx(share + row["reward/length/added_mean"])
    # The scales of the update that was kept have seen its own rollouts and all before.
    seen = whole.reward_state["moments"]["lower"]["count"]
    assert seen == len(PROMPTS) + whole.chosen_update * settings.rollouts_per_update


def asks_why(conversations: Sequence[Prompt], /) -> list[str | None]:
    """Ask why; leave those who gave a long answer."""
    return [None if len(c[-1].content) > 9 else "why" for c in conversations]


def test_conversations_and_what_is_replayed_resume_exactly(base: Path, tmp_path: Path) -> None:
    settings = changed(
        updates=4, evaluate_every=4, replay_updates=2, max_turns=2, max_prompt_tokens=48, top_k=9
    )

    def run(folder: str, **options: Any) -> TrainingResult:
        return train(base, tmp_path / folder, settings, user=asks_why, **options)

    def stop() -> None:
        if len(list((tmp_path / "cut/checkpoints").glob("update-*3"))):
            raise Interrupted

    with pytest.raises(Interrupted):
        run("cut", keep_going=stop)
    resumed, whole = run("cut"), run("whole")
    assert resumed.resumed_from == 3
    assert_same_run((whole, tmp_path / "whole"), (resumed, tmp_path / "cut"))
    assert whole.history[3]["replay/staleness"] > 1
    assert whole.history[3]["rollout/turns_mean"] > 1


def test_what_a_look_heard_of_a_turn_teaches_no_criteria_heads(base: Path, tmp_path: Path) -> None:
    """Only ends are scored: a turn before one may say what a look scored as an end."""
    settings = changed(
        updates=3,
        evaluate_every=3,
        checkpoint_every=3,
        max_turns=2,
        max_prompt_tokens=48,
        reward_timing="end",
        temperature=0.2,
    )

    def run(folder: str, **options: Any) -> TrainingResult:
        def user(conversations: Sequence[Prompt], /) -> list[str | None]:
            return [None if c[0].content == "hi" else "why" for c in conversations]

        return train(base, tmp_path / folder, settings, user=user, reward=two_pieces(), **options)

    def report(facts: Mapping[str, float | int | str]) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        run("cut", report=report)
    resumed, whole = run("cut"), run("whole")
    assert resumed.resumed_from == 0
    assert_same_run((whole, tmp_path / "whole"), (resumed, tmp_path / "cut"))
    file = "checkpoints/update-000003/criteria.safetensors"
    heads = [load_file(tmp_path / run / file) for run in ("cut", "whole")]
    assert all(torch.equal(tensor, heads[1][name]) for name, tensor in heads[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("calls", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {"critic": "separate"},
        {"estimator": "rloo", "completions_per_prompt": 2},
        {"lora_rank": 2},
        {"precision": "bfloat16", "ratio_tolerance": 0.1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_variant_resumes_exactly(
    base: Path, tmp_path: Path, changes: dict[str, Any], calls: int
) -> None:
    moving = {"kl_controller": "adaptive", "kl_horizon": 100, "score_normalisation": "running"}
    settings = changed(updates=4, evaluate_every=4, **{**moving, **changes})
    interrupt_and_compare(base, tmp_path, settings, calls)
