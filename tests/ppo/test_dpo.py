"""DPO in PPO's clothes: it learns the pairs, its first loss is log 2, the same result comes out."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaModel, TrainerState

from rlhf_pipeline.errors import ConfigError, NotEnoughData, TrainingError
from rlhf_pipeline.policy.chat import encode_completions, encode_prompts
from rlhf_pipeline.policy.loading import load_policy, save_policy
from rlhf_pipeline.ppo import dpo
from rlhf_pipeline.ppo.dpo import _Watcher, dpo_rows, train_dpo
from rlhf_pipeline.ppo.learner import build_learner
from rlhf_pipeline.ppo.plots import draw_plots
from rlhf_pipeline.ppo.result import Evaluation, TrainingResult
from rlhf_pipeline.records import PreferencePair, ignore_progress
from tests.policy.test_chat import plain_tokenizer
from tests.policy.test_families import family_model
from tests.ppo.world import PROMPTS, changed, lower_share, weights_of

LOUD, QUIET = "YES YES", "yes yes"


def pairs(count: int, **changes: Any) -> list[PreferencePair]:
    """Return pairs by people who like it quiet."""
    given: dict[str, Any] = {
        "chosen": QUIET,
        "rejected": LOUD,
        "voter": "ann",
        "origin": "test",
        "split": "train",
        **changes,
    }
    return [
        PreferencePair(pair_id=f"pair {n}", prompt=PROMPTS[n % len(PROMPTS)], **given)
        for n in range(count)
    ]


def train(base: Path, folder: Path, rows: list[PreferencePair], **changes: Any) -> TrainingResult:
    report = changes.pop("report", ignore_progress)
    given = {"learning_rate": 3e-3, "epochs": 4, "updates": 50, **changes}
    settings = changed(estimator="dpo", **given)
    return train_dpo(
        policy_dir=base,
        reference_dir=base,
        pairs=rows,
        reward=lower_share,
        stopping=lower_share,
        watch_prompts=PROMPTS[:4],
        output_dir=folder,
        settings=settings,
        report=report,
    )


@pytest.fixture(autouse=True)
def _draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plots, which take as long as a training here, are drawn where they are looked at."""
    monkeypatch.setattr(dpo, "draw_plots", lambda *_: ())


ADAPTERS = pytest.param({"lora_rank": 4, "lora_alpha": 16.0}, marks=pytest.mark.slow, id="lora")


@pytest.mark.parametrize("lora", [pytest.param({}, id="all"), ADAPTERS])
def test_it_learns_what_people_prefer(
    base: Path, tmp_path: Path, lora: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dpo, "draw_plots", draw_plots)
    result = train(base, tmp_path, pairs(64), **lora)
    assert result.loss_history[-1] < 0.1 < result.loss_history[0] < math.log(2)
    assert result.history[-1]["dpo/accuracy"] == 1.0
    assert result.history[-1]["dpo/margin"] > result.history[0]["dpo/margin"] + 0.1
    assert TrainingResult.load(tmp_path / "result.json") == result
    first, last = result.evaluations[0].samples, result.evaluations[-1].samples
    assert [s["completion"] for s in first] == [s["baseline"] for s in first]
    assert [s["baseline"] for s in last] == [s["baseline"] for s in first]
    assert [s["completion"] for s in last] != [s["baseline"] for s in last]
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == sum(len(look.samples) for look in result.evaluations) > 0
    trained = math.fsum(facts["time/train"] for facts in result.history)
    assert result.seconds["train"] == pytest.approx(trained, rel=0.5)  # and the end after the last
    assert result.seconds["watch"] > 0
    assert result.history[-1]["memory/process_peak"] > 50
    assert (tmp_path / "plots" / "training.png").exists()
    load_policy(tmp_path / "policy")
    kept = tmp_path / "policy" / "adapter"
    assert not kept.exists() or not any(path.is_dir() for path in kept.iterdir())  # ours alone


def test_the_first_step_sees_the_reference_itself(base: Path, tmp_path: Path) -> None:
    """One step at rate 0 moves nothing: margin 0, loss log 2. No second one is loaded for it."""
    with patch("rlhf_pipeline.ppo.dpo.load_policy", side_effect=AssertionError("loaded twice")):
        result = train(base, tmp_path, pairs(16), updates=1, minibatches=1, learning_rate=1e-12)
    assert result.loss_history[0] == pytest.approx(math.log(2), abs=1e-4)
    assert result.history[0]["dpo/margin"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("phimoe", {"num_local_experts": 4}),
        ("mixtral", {"num_local_experts": 4, "output_router_logits": True}),
    ],
)
def test_a_mixture_of_experts_begins_at_its_reference_too(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    """Its router draws nothing, and its loss is DPO's alone."""
    base, tokenizer = tmp_path / family, plain_tokenizer()
    model = family_model(
        family,
        vocab_size=len(tokenizer),
        num_key_value_heads=1,
        max_position_embeddings=96,
        pad_token_id=None,
        eos_token_id=int(tokenizer.eos_token_id),
        **options,
    )
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    one_step = {"updates": 1, "minibatches": 1, "learning_rate": 1e-12}
    result = train(base, tmp_path / "out", pairs(16), long_prompts="keep_latest", **one_step)
    assert result.loss_history[0] == pytest.approx(math.log(2), abs=1e-5)
    assert result.history[0]["dpo/margin"] == pytest.approx(0, abs=1e-5)


def test_pairs_that_are_cut_off_before_they_differ_are_left_out(base: Path, tmp_path: Path) -> None:
    long = QUIET * 40
    alike = pairs(8, chosen=f"{long} yes", rejected=f"{long} YES")
    heard: list[str] = []

    def run(rows: list[PreferencePair]) -> TrainingResult:
        one_update = {"updates": 1, "minibatches": 4, "rollouts_per_update": 16, "epochs": 1}
        return train(
            base,
            tmp_path,
            rows,
            report=lambda facts: heard.append(str(facts.get("left out", ""))),
            **one_update,
        )

    with pytest.raises(NotEnoughData, match=r"needs 4 pairs .* found 3 beside 8 whose sides are"):
        run([*pairs(3), *alike])
    heard.clear()
    assert run([*pairs(8), *alike]).history[0]["dpo/margin"] > 0
    assert "8 pairs whose sides are the same up to policy.max_completion_tokens" in heard


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_what_is_taught_is_the_policy_at_the_temperature_it_is_sampled_at(
    base: Path, tmp_path: Path, temperature: float
) -> None:
    """One step at rate 0 of another policy than the reference: its margin is known beforehand."""
    policy = load_policy(base, device="cpu")
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[40:80] *= 1.5
    save_policy(policy, tmp_path / "policy")
    settings = changed(
        estimator="dpo", updates=1, minibatches=1, learning_rate=1e-12, temperature=temperature
    )
    result = train_dpo(
        policy_dir=tmp_path / "policy",
        reference_dir=base,
        pairs=pairs(12),
        reward=lower_share,
        stopping=lower_share,
        watch_prompts=PROMPTS[:4],
        output_dir=tmp_path / "out",
        settings=settings,
    )
    new, old = policy.model, load_policy(base, device="cpu").model
    margins = []
    for row in dpo_rows(policy, pairs(12), settings):
        ratios = {}
        for side in ("chosen_ids", "rejected_ids"):
            ids = torch.tensor([row["prompt_ids"] + row[side]])
            said = torch.tensor(row[side])[:, None]
            with torch.no_grad():
                at = [m(ids).logits[0, -len(said) - 1 : -1] / temperature for m in (new, old)]
            lps = [x.log_softmax(-1).gather(1, said).sum() for x in at]
            ratios[side] = lps[0] - lps[1]
        margins.append(ratios["chosen_ids"] - ratios["rejected_ids"])
    wanted = settings.dpo_beta * float(torch.stack(margins).mean())
    assert abs(wanted) > 0.01
    assert result.history[0]["dpo/margin"] == pytest.approx(wanted, rel=1e-3)


def test_a_run_is_known_by_the_pairs_it_learnt_from(base: Path, tmp_path: Path) -> None:
    rows, once = pairs(16), {"updates": 1, "minibatches": 1}
    others = [*rows[1:], replace(rows[0], chosen="yes")]
    found = [
        train(base, tmp_path / name, some, **once).fingerprint
        for name, some in (("one", rows), ("again", rows), ("other", others))
    ]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(("count", "updates"), [(23, 4), (10, 2), (13, 3)])
def test_as_many_passes_are_made_as_asked_for_whatever_the_number_of_pairs(
    base: Path, tmp_path: Path, count: int, updates: int
) -> None:
    """Two passes over 23 pairs, 6 a step and 2 steps an update: 8 steps; over 10 pairs: 4."""
    result = train(base, tmp_path, pairs(count), epochs=2, evaluate_every=9)
    assert (len(result.history), result.training_steps) == (updates, 2 * updates)


def test_a_pass_holds_no_more_tokens_than_a_microbatch_may(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    forward = LlamaModel.forward

    @wraps(forward)  # what it takes can be read off it
    def watched(self: Any, input_ids: Any = None, **options: Any) -> Any:
        held.append(input_ids.numel() * self.training)
        return forward(self, input_ids=input_ids, **options)

    monkeypatch.setattr(LlamaModel, "forward", watched)
    losses = []
    for tokens in (5_000, 160):
        held.clear()
        options = {"tokens_per_microbatch": tokens, "updates": 2, "evaluate_every": 9}
        losses.append(train(base, tmp_path / str(tokens), pairs(24), **options).loss_history)
        assert 0 < max(held) <= tokens
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_pass_that_ends_with_fewer_pairs_counts_each_alike_however_many_run_at_once(
    base: Path, tmp_path: Path
) -> None:
    """11 pairs, 6 a step: 5 are left, which 2 or 4 at once divide into parts of unequal size."""
    rows = [
        *pairs(6),
        *(replace(p, chosen=LOUD, rejected=QUIET) for p in pairs(5)),
    ]
    found = []
    for at_once in (6, 3, 2, 1):
        with patch("rlhf_pipeline.ppo.dpo.pairs_at_once", return_value=at_once):
            folder = tmp_path / str(at_once)
            result = train(base, folder, rows, epochs=2, evaluate_every=9, max_grad_norm=1e9)
        told = ("train/loss", "dpo/margin", "dpo/accuracy", "policy/grad_norm")
        assert len(result.history) == 2
        found.append([update[name] for update in result.history for name in told])
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-3, abs=1e-5)


def test_an_updates_metrics_are_of_all_its_steps(base: Path, tmp_path: Path) -> None:
    steps: list[dict[str, float]] = []
    hear = _Watcher.on_log

    def heard(self: Any, args: Any, state: Any, control: Any, logs: Any, **rest: Any) -> None:
        steps.append(dict(logs))
        hear(self, args, state, control, logs, **rest)

    with patch.object(_Watcher, "on_log", heard):
        result = train(base, tmp_path, pairs(11), epochs=1, evaluate_every=9)
    one, other = steps[:2]  # of 6 pairs, and of the 5 that are left
    (update,) = result.history
    assert update["policy/grad_norm"] == pytest.approx((one["grad_norm"] + other["grad_norm"]) / 2)
    assert update["train/loss"] == pytest.approx((one["loss"] + other["loss"]) / 2)
    margins = 6 * one["rewards/margins"] + 5 * other["rewards/margins"]
    assert update["dpo/margin"] == pytest.approx(margins / 11)


def test_alarms_name_what_dpo_can_change(base: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"learning_rate": 0.1, "kl_target": 0.01, "dpo_beta": 0.01}
    result = train(base, tmp_path, pairs(24), **changes)
    (alarm,) = [alarm for alarm in result.alarms if alarm.name == "kl_blow_up"]
    assert "ppo.dpo_beta" in alarm.remedy
    for alarm in result.alarms:
        for setting in ("kl_coef", "kl_controller", "missing_eos_score", "score_clip"):
            assert setting not in alarm.remedy


def test_pairs_are_encoded_as_sampling_encodes_them(base: Path) -> None:
    policy, settings = load_policy(base), changed(estimator="dpo")
    (row,) = dpo_rows(policy, pairs(1), settings)
    prompt = encode_prompts(policy.tokenizer, [PROMPTS[0]], max_tokens=settings.max_prompt_tokens)
    chosen = encode_completions(
        policy.tokenizer, [QUIET], max_tokens=settings.max_completion_tokens
    )
    assert row["prompt_ids"] == prompt[0]
    assert row["chosen_ids"] == chosen[0]


def test_a_pair_whose_prompt_is_too_long_is_refused_or_shortened_as_for_ppo(base: Path) -> None:
    policy, limits = load_policy(base), {"estimator": "dpo", "max_prompt_tokens": 3}
    with pytest.raises(TrainingError, match=r"prompts of pairs must have at most .* = 3 tokens"):
        dpo_rows(policy, pairs(1), changed(**limits))
    (row,) = dpo_rows(policy, pairs(1), changed(**limits, long_prompts="keep_latest"))
    assert len(row["prompt_ids"]) == 3


def test_the_best_look_comes_out_and_not_the_last(base: Path, tmp_path: Path) -> None:
    """A stopping reward that likes the start best takes everything back."""
    looks = 0

    def tires(items: Any) -> list[float]:
        nonlocal looks
        looks += 1
        return [-float(looks)] * len(items)

    given = {"learning_rate": 3e-3, "updates": 3, "evaluate_every": 1, "patience": 2}
    settings = changed(estimator="dpo", **given)
    result = train_dpo(
        policy_dir=base,
        reference_dir=base,
        pairs=pairs(64),
        reward=lower_share,
        stopping=tires,
        watch_prompts=PROMPTS[:4],
        output_dir=tmp_path,
        settings=settings,
    )
    assert result.chosen_update == 0
    assert [e.update for e in result.evaluations] == [0, 1, 2]  # its patience is at an end
    assert result.stopped_because.startswith("the stopping score has not risen for 2 looks")
    assert len(result.history) == 2
    before, after = weights_of(base), weights_of(tmp_path / "policy")
    assert all((before[name] == after[name]).all() for name in before)


def test_what_cannot_be_learnt_from_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(NotEnoughData, match="found 0"):
        train(base, tmp_path, pairs(64, tie=True))
    with pytest.raises(TrainingError, match="watch_prompts"):
        train_dpo(
            policy_dir=base,
            reference_dir=base,
            pairs=pairs(64),
            reward=lower_share,
            stopping=None,
            watch_prompts=[],
            output_dir=tmp_path,
            settings=changed(estimator="dpo"),
        )


@pytest.mark.parametrize(
    ("scale", "logs", "stops"),
    [
        (2.0**15, {"grad_norm": math.inf}, False),
        (2.0**15, {"grad_norm": math.nan}, False),
        (0.5, {"grad_norm": math.inf}, True),  # no scale has helped
        (2.0**15, {"loss": math.nan, "grad_norm": math.nan}, True),
        (None, {"grad_norm": math.inf}, True),  # nothing skips the step but float16's scaler
    ],
)
def test_only_a_float16_gradient_that_was_not_stepped_with_may_overflow(
    base: Path, scale: float | None, logs: dict[str, float], stops: bool
) -> None:
    told: list[Any] = []
    learner = build_learner(base, base, None, changed(estimator="dpo", evaluate_every=9))
    look = partial(pytest.fail, "no look")
    watcher = _Watcher(learner, 9, lambda _: 3, look, told.append, lambda: None)
    watcher.looks = [Evaluation(0, 0.0, 0.0, None, 0.0, 1.0, 1.0)]
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    whole = {"loss": 0.7, "learning_rate": 1e-4, "grad_norm": 1.0} | logs
    whole |= {"rewards/margins": 0.0, "rewards/accuracies": 0.5}
    state, optimizer = TrainerState(global_step=2), SimpleNamespace(scaler=scaler)
    if stops:
        with pytest.raises(TrainingError, match=r"must stay finite, found .* at update 1"):
            watcher.on_log(None, state, None, whole, optimizer=optimizer)
        return
    watcher.on_log(None, state, None, whole, optimizer=optimizer)
    (facts,) = watcher.history
    assert facts["train/loss_scale"] == scale
    assert "policy/grad_norm" not in facts
    assert told == [{"update": 1, "updates": 9, **facts}]


def test_several_processes_are_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="DPO is trained by one process, found WORLD_SIZE 2"):
        train(base, tmp_path, pairs(8))
