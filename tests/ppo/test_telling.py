"""What a run says of itself: samples beside the baseline's, statistics, memory, trackers."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate.tracking
import pytest
import torch

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.policy.loading import Policy, load_policy, save_policy
from rlhf_pipeline.ppo import checkpoint, memory, trackers
from rlhf_pipeline.ppo.collecting import encode_checked, sample_for
from rlhf_pipeline.ppo.measuring import advantage_facts, perplexity
from rlhf_pipeline.ppo.result import TrainingResult
from tests.ppo.world import PROMPTS, SETTINGS, changed, learner_at, tiny_policy, train


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingResult, Path]:
    """Return a run of three updates that looked at its prompts twice on the way."""
    folder = tmp_path_factory.mktemp("telling")
    return train(base, folder, changed(updates=3, samples_shown=2), feedback_count=7), folder


def test_statistics_of_advantages_are_those_of_the_tokens_that_count() -> None:
    advantages = torch.tensor([[1.0, 3.0, 1e9], [-2.0, torch.nan, 6.0]])
    mask = torch.tensor([[True, True, False], [True, False, True]])
    found = advantage_facts(advantages, mask)
    assert found == {
        "rollout/advantage_mean": pytest.approx(2.0),
        "rollout/advantage_std": pytest.approx(math.sqrt((1 + 1 + 16 + 16) / 4)),
        "rollout/advantage_min": -2.0,
        "rollout/advantage_max": 6.0,
    }


def test_every_update_tells_what_the_field_expects(run: tuple[TrainingResult, Path]) -> None:
    result, _ = run
    assert result.feedback_count == 7
    for facts in result.history:
        assert facts["rollout/perplexity"] == pytest.approx(math.exp(facts["rollout/entropy"]))
        apart = math.log(facts["rollout/reference_perplexity"] / facts["rollout/perplexity"])
        assert apart == pytest.approx(facts["rollout/kl_mean"], abs=1e-5)
        assert 0 < facts["rollout/token_accuracy"] < 1
        assert facts["rollout/advantage_min"] < facts["rollout/advantage_mean"]
        assert facts["rollout/advantage_mean"] < facts["rollout/advantage_max"]
        assert facts["time/tokens_per_second"] > 0
        assert facts["memory/process_peak"] > 50


def test_perplexity_is_the_number_of_equal_choices() -> None:
    assert perplexity(math.log(8)) == pytest.approx(8)
    assert perplexity(1e6) < math.inf  # JSON has no infinity


def test_token_accuracy_counts_the_likeliest_tokens(base: Path) -> None:
    learner = learner_at(base)
    encoded = encode_checked(learner.policy, PROMPTS, SETTINGS, "prompts")
    sampled = sample_for(learner, encoded, torch.Generator().manual_seed(0))
    assert sampled.likeliest is not None
    mask = sampled.tokens.completion_mask
    assert not sampled.likeliest[~mask].any()
    tokens = sampled.tokens
    for i in range(len(tokens)):
        prompt, said = (
            tokens.prompt_ids[i][tokens.prompt_mask[i]],
            tokens.completion_ids[i][mask[i]],
        )
        with torch.no_grad():
            logits = learner.policy.model(torch.cat([prompt, said])[None]).logits[0]
        by_hand = logits[len(prompt) - 1 : -1].argmax(-1) == said
        assert sampled.likeliest[i][mask[i]].tolist() == by_hand.tolist()
    assert 0 < sampled.likeliest[mask].float().mean() < 1


def test_samples_stand_beside_the_baselines_and_change_while_those_stay(
    run: tuple[TrainingResult, Path],
) -> None:
    result, folder = run
    first, *later = result.evaluations
    assert [sample["prompt"] for sample in first.samples] == ["hi", "tell me a tale"]
    assert all(sample["completion"] == sample["baseline"] for sample in first.samples)
    for look in later:
        assert [s["baseline"] for s in look.samples] == [s["baseline"] for s in first.samples]
    assert any(s["completion"] != s["baseline"] for look in later for s in look.samples)
    lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        dict(sample) for look in result.evaluations for sample in look.samples
    ]
    assert TrainingResult.load(folder / "result.json") == result


def test_the_baseline_is_the_reference_not_where_training_begins(
    base: Path, tmp_path: Path
) -> None:
    other = tiny_policy()
    with torch.no_grad():
        other.model.get_input_embeddings().weight.mul_(-1.0)
    save_policy(Policy(other.model, other.tokenizer), tmp_path / "other")
    result = train(
        base,
        tmp_path / "run",
        changed(updates=1, samples_shown=3),
        reference_dir=tmp_path / "other",
    )
    looks = result.evaluations
    assert any(s["completion"] != s["baseline"] for s in looks[0].samples)
    again = learner_at(tmp_path / "other", changed(samples_shown=3))
    encoded = encode_checked(again.policy, PROMPTS[:3], SETTINGS, "prompts")
    generator = torch.Generator().manual_seed(SETTINGS.seed + 2)
    assert [s["baseline"] for s in looks[0].samples] == sample_for(again, encoded, generator).texts


@pytest.mark.parametrize("shown", [0, 1, 3])
def test_a_resumed_run_shows_as_many_samples_as_it_is_asked_for(
    base: Path, tmp_path: Path, shown: int
) -> None:
    settings = changed(updates=2, samples_shown=2)

    def stop() -> None:
        if (tmp_path / "checkpoints/update-000001").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(base, tmp_path, settings, keep_going=stop)
    result = train(base, tmp_path, changed(updates=2, samples_shown=shown))
    assert [len(look.samples) for look in result.evaluations] == [2, 2, shown]
    first, last = result.evaluations[0].samples, result.evaluations[-1].samples
    assert [s["baseline"] for s in last][:2] == [s["baseline"] for s in first][:shown]


def test_what_a_killed_write_left_is_removed_when_the_run_goes_on(
    base: Path, tmp_path: Path
) -> None:
    left = tmp_path / "checkpoints" / ".update-000001.new-0123456789ab"
    left.mkdir(parents=True)
    (left / "policy.safetensors").write_bytes(b"half")
    (tmp_path / ".policy.old-0123456789ab").mkdir()
    (tmp_path / ".result.json.new-0123456789ab").write_bytes(b"half")
    train(base, tmp_path, changed(updates=1, samples_shown=0))
    assert not [*tmp_path.glob(".*"), *tmp_path.glob("checkpoints/.*")]
    assert checkpoint.checkpoint_updates(tmp_path / "checkpoints") == [0, 1]
    assert not (tmp_path / "samples.jsonl").exists()


def test_freed_blocks_are_given_back_by_large_models_and_kept_by_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int]] = []

    def mallopt(option: int, value: int) -> int:
        asked.append((option, value))
        return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    monkeypatch.setattr("sys.platform", "linux")
    small = torch.empty(1000, device="meta")
    large = torch.empty(memory.LARGE_MODEL // 4, device="meta")
    assert memory.suit_allocator([small])
    assert asked == [(-3, 2**25), (-1, 2**28)]
    asked.clear()
    assert memory.suit_allocator([small, large])
    assert asked == [(-3, 2**20)]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())  # another C library
    assert not memory.suit_allocator([large])


def test_freed_memory_goes_back_between_phases(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    library = SimpleNamespace(malloc_trim=asked.append)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr("sys.platform", "linux")
    train(base, tmp_path / "out", changed(updates=1))
    assert asked == [0, 0, 0]  # after sampling, measuring, training
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())  # another C library
    memory.give_back_freed()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells")
def test_the_peak_of_resident_memory_counts_from_where_it_was_forgotten() -> None:
    memory.forget_peak()
    before, _ = memory.resident_memory()
    # Mapped by itself: glibc would take it from what is free in its heap, and keep it there.
    with mmap.mmap(-1, 2**26) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
    assert memory.resident_memory()[1] - before > 48 * 2**20
    memory.forget_peak()
    assert memory.resident_memory()[1] - before < 48 * 2**20


def test_tensorboard_hears_every_update(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with trackers.reporting(["tensorboard"], tmp_path, "shop") as report:
        report({"model": "proxy", "step": 3})  # not an update
        for update in (1, 2):
            report({"update": update, "updates": 2, "rollout/score_mean": update / 4, "note": "x"})
    events = EventAccumulator(str(tmp_path / "shop"))
    events.Reload()
    assert events.Tags()["scalars"] == ["rollout/score_mean"]
    heard = [(e.step, e.value) for e in events.Scalars("rollout/score_mean")]
    assert heard == [(1, 0.25), (2, 0.5)]


def test_tensorboard_hears_an_update_that_is_made_again_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for attempt, updates in enumerate([(1, 2, 3), (2, 3, 4)]):  # killed; goes on from update 1
        with trackers.reporting(["tensorboard"], tmp_path, "shop") as report:
            for update in updates:
                report({"update": update, "train/loss": update + attempt / 2})
        for file in (tmp_path / "shop").iterdir():  # named by the second, read in that order
            file.rename(file.with_name(file.name.replace(".tfevents.", f".tfevents.{attempt}", 1)))
    events = EventAccumulator(str(tmp_path / "shop"))
    events.Reload()
    heard = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert heard == [(1, 1.0), (2, 2.5), (3, 3.5), (4, 4.5)]


def test_weights_and_biases_is_started_logged_to_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[Any, ...]] = []

    class Fake:
        requires_logging_directory = False

        def __init__(self, run_name: str) -> None:
            said.append(("made", run_name))

        def start(self) -> None:
            said.append(("started",))

        def log(self, values: dict[str, float], step: int) -> None:
            said.append((step, values))

        def finish(self) -> None:
            said.append(("ended",))

    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "wandb", Fake)

    def fail_midway() -> None:
        with trackers.reporting(["wandb"], tmp_path, "shop") as report:
            report({"update": 1, "train/loss": 0.5})
            raise RuntimeError("mid-way")

    with pytest.raises(RuntimeError, match="mid-way"):
        fail_midway()
    assert said == [("made", "shop"), ("started",), (1, {"train/loss": 0.5}), ("ended",)]


def test_trackers_let_processes_be_joined_as_training_joins_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, bool]] = []
    monkeypatch.setattr(accelerate, "PartialState", lambda **how: asked.append(how))
    with trackers.reporting(["tensorboard"], tmp_path, "shop", device="cpu"):
        pass
    assert asked == [{"cpu": True}]


@pytest.mark.parametrize("name", ["wandb", "aim"])
def test_a_tracker_that_is_not_there_is_refused_before_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with (
        pytest.raises(ConfigError, match=re.escape(f"found '{name}' is not; pip install")),
        trackers.reporting([name], tmp_path, "shop"),
    ):
        pass


def test_the_chosen_policy_is_what_its_samples_show(run: tuple[TrainingResult, Path]) -> None:
    result, _ = run
    look = next(e for e in result.evaluations if e.update == result.chosen_update)
    learner = learner_at(Path(result.model_path), changed(samples_shown=2))
    encoded = encode_checked(learner.policy, PROMPTS[:2], SETTINGS, "prompts")
    generator = torch.Generator().manual_seed(SETTINGS.seed + 2)
    texts = sample_for(learner, encoded, generator).texts
    assert [s["completion"] for s in look.samples] == texts
    assert load_policy(result.model_path).context_length == 64
