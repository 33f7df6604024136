"""A version trained again comes out bit for bit; what its lineage cannot prove is refused."""

from __future__ import annotations

import gzip
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs

from resources.worker import specification
from rlhf_pipeline import stages
from rlhf_pipeline.errors import HashMismatch, ModelError, RegistryError
from rlhf_pipeline.experiment import offline
from rlhf_pipeline.feedback.datasets import JOBS, conversation_of
from rlhf_pipeline.files import file_sha256, folder_sha256, write_json
from rlhf_pipeline.policy.adapters import base_digest
from rlhf_pipeline.registry.ledger import ModelVersion
from rlhf_pipeline.registry.reasons import turn_of
from rlhf_pipeline.registry.reproduce import Reproduction, recorded_turn, reproduce
from rlhf_pipeline.reward import SETTINGS
from tests.assets.world import FirstTurn, Loop


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_version_of_a_real_turn_comes_out_again_bit_for_bit(
    number: int, loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    """Also version 1, whose PPO process had been killed and resumed on the day."""
    version = loop.version(first_turn.agent_id, number)
    settings = loop.pipeline.settings(first_turn.agent_id)
    outcome = reproduce(loop.pipeline.ledger, settings, version, tmp_path / "work")
    assert outcome.is_exact, outcome.different
    assert "model.safetensors" in outcome.same


def test_version_0_from_a_base_model_is_trained_as_it_was(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lineage names what it started from, as that of a later version names its champion."""
    version, ledger = loop.version(first_turn.agent_id, 0), loop.pipeline.ledger
    settings = loop.pipeline.settings(first_turn.agent_id)
    base = replace(version, lineage={**version.lineage, "started_from": str(tmp_path / "base")})
    assert base.lineage["reward_models"] == {}
    ran: list[str] = []
    for name in stages.STAGES:
        monkeypatch.setitem(stages.STAGES, name, lambda *_, name=name: ran.append(name))
    (tmp_path / "work" / "sft").mkdir(parents=True)
    outcome = reproduce(ledger, settings, base, tmp_path / "work")
    assert (ran, outcome.folder) == (["baseline"], tmp_path / "work" / "sft")
    with pytest.raises(RegistryError, match="trained by no reward"):
        turn_of(loop.pipeline.registry, settings, base)


@pytest.mark.parametrize("number", [0, 1])
def test_a_reproduction_needs_no_key_of_what_it_never_asks(
    number: int,
    loop: Loop,
    first_turn: FirstTurn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody gives a verdict again, and version 0 was trained by no reward."""
    version, ledger = loop.version(first_turn.agent_id, number), loop.pipeline.ledger
    judge = {"url": "https://judge.example/v1", "model": "m", "key_variable": "NO_SUCH_KEY"}
    mine = {"function": "https://mine.example/", "options": {"key_variable": "NO_OTHER_KEY"}}
    recipe = dict(version.lineage["recipe"])
    recipe["evaluation"] = {**recipe["evaluation"], "judge": judge}
    recipe["reward"] = {**recipe["reward"], "functions": {"mine": mine}}
    if number == 0:  # the turn's reward stage refused it
        short = {"max_prompt_tokens": 1, "max_completion_tokens": 1}
        write_json(tmp_path / "short" / "proxy" / SETTINGS, short)
        recipe["reward"]["given"] = str(tmp_path / "short")
    keyed = replace(version, lineage={**version.lineage, "recipe": recipe})
    settings = loop.pipeline.settings(first_turn.agent_id)
    ran: list[str] = []

    def run(turn: stages.Turn, *_: object) -> None:
        stages.check_before_training(turn)
        ran.append("checked")

    for name in stages.STAGES:
        monkeypatch.setitem(stages.STAGES, name, run)
    for folder in (tmp_path / "work" / "sft", tmp_path / "work" / "ppo" / "policy"):
        folder.mkdir(parents=True)
    if number == 0:
        reproduce(ledger, settings, keyed, tmp_path / "work")
        assert ran == ["checked"]
        return
    with pytest.raises(ModelError, match="the reward mine needs its key in NO_OTHER_KEY"):
        reproduce(ledger, settings, keyed, tmp_path / "work")
    monkeypatch.setenv("NO_OTHER_KEY", "some")
    reproduce(ledger, settings, keyed, tmp_path / "work")
    assert ran == ["checked"] * 2


def test_a_base_with_other_weights_is_said_before_anything_is_trained(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    version, ledger = loop.version(first_turn.agent_id, 0), loop.pipeline.ledger
    settings = loop.pipeline.settings(first_turn.agent_id)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder, name in ((base, "model"), (adapter, "adapter_model")):
        folder.mkdir()
        (folder / f"{name}.safetensors").write_bytes(b"some")
    (base / "config.json").write_text("{}")
    (adapter / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{base}"}}')

    def turn(source: Path, digest: str) -> stages.Turn:
        recipe = dict(version.lineage["recipe"])
        recipe["policy"] = {**recipe["policy"], "base": str(source)}
        lineage = {**version.lineage, "recipe": recipe, "base_digest": digest}
        return recorded_turn(ledger, settings, replace(version, lineage=lineage), tmp_path / "work")

    of_base, of_both = base_digest(base), base_digest(adapter)
    of_adapter = of_both.partition("+")[0]  # all that earlier releases recorded
    for source, digest in ((base, of_base), (adapter, of_both), (adapter, of_adapter)):
        assert turn(source, digest).settings.policy.base == str(source)
    (base / "model.safetensors").write_bytes(b"other")
    assert turn(adapter, of_adapter).settings.policy.base == str(adapter)
    for source, digest in ((base, of_base), (adapter, of_both)):
        with pytest.raises(HashMismatch, match=f"found other weights at {source}"):
            turn(source, digest)
    (adapter / "adapter_model.safetensors").write_bytes(b"other")
    with pytest.raises(HashMismatch, match="needs the base it was trained from"):
        turn(adapter, of_adapter)
    gone = tmp_path / "gone"
    with pytest.raises(RegistryError, match=f"found no folder at {gone}; restore it"):
        turn(gone, of_base)


def test_adapters_of_an_earlier_release_are_the_same_in_another_order(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wrote the names of their layers as each process hashed them; the base has moved since."""
    version, ledger = loop.version(first_turn.agent_id, 1), loop.pipeline.ledger
    settings = loop.pipeline.settings(first_turn.agent_id)
    then: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    then["base_model_name_or_path"] = "/before/sft"
    now = {**then, "target_modules": ["k_proj", "q_proj", "v_proj"]}
    now["base_model_name_or_path"] = "/today/sft"
    registered = tmp_path / "registered"
    write_json(registered / "adapter" / "adapter_config.json", then)
    old = replace(version, path=registered, files=folder_sha256(registered))

    def outcome(name: str, written: dict[str, Any]) -> Reproduction:
        policy = tmp_path / name / "ppo" / "policy"
        for stage in stages.STAGES:
            monkeypatch.setitem(stages.STAGES, stage, lambda *_: {})
        write_json(policy / "adapter" / "adapter_config.json", written)
        return reproduce(ledger, settings, old, tmp_path / name)

    assert outcome("again", now).is_exact
    different = ("adapter/adapter_config.json",)
    assert outcome("others", {**now, "target_modules": ["k_proj"]}).different == different
    assert outcome("rank", {**now, "r": 4}).different == different
    write_json(registered / "adapter" / "adapter_config.json", {**then, "r": 4})
    assert outcome("written to", {**now, "r": 4}).different == different


def test_adapters_of_an_earlier_release_are_the_same_without_the_sets_beside_them(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept those of reward models on the same base too, under names of each run's own."""
    version, ledger = loop.version(first_turn.agent_id, 1), loop.pipeline.ledger
    settings = loop.pipeline.settings(first_turn.agent_id)
    weights = "adapter/adapter_model.safetensors"
    own = {f"q_proj.lora_{part}.weight": torch.rand(2, 3) for part in "AB"}
    beside = {f"q_proj.lora_{part}.reward-1a2b.weight": torch.rand(2, 3) for part in "AB"}

    def saved(name: str, sets: dict[str, torch.Tensor]) -> Path:
        (tmp_path / name / "adapter").mkdir(parents=True)
        save_file(sets, tmp_path / name / weights, {"format": "pt"})
        return tmp_path / name

    def different(name: str, sets: dict[str, torch.Tensor]) -> tuple[str, ...]:
        for stage in stages.STAGES:
            monkeypatch.setitem(stages.STAGES, stage, lambda *_: {})
        saved(f"{name}/ppo/policy", sets)
        return reproduce(ledger, settings, old, tmp_path / name).different

    registered = saved("registered", own | beside)
    old = replace(version, path=registered, files=folder_sha256(registered))
    assert different("again", own) == ()
    other = {name: weight + 1e-6 for name, weight in own.items()}
    assert different("other", other) == (weights,)
    assert different("less", dict([*own.items()][:1])) == (weights,)
    save_file(other | beside, registered / weights)
    assert different("written to", other) == (weights,)


def test_what_an_earlier_release_wrote_of_sampling_is_no_difference(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept how the base's makers sample, and wrote the end token twice."""
    version, ledger = loop.version(first_turn.agent_id, 1), loop.pipeline.ledger
    settings = loop.pipeline.settings(first_turn.agent_id)
    for stage in stages.STAGES:
        monkeypatch.setitem(stages.STAGES, stage, lambda *_: {})
    told = "generation_config.json"
    then = {"eos_token_id": [4, 1, 4], "pad_token_id": 0, "temperature": 0.7}
    write_json(tmp_path / "registered" / told, then)
    old = replace(
        version, path=tmp_path / "registered", files=folder_sha256(tmp_path / "registered")
    )

    def different(name: str, written: dict[str, Any]) -> tuple[str, ...]:
        write_json(tmp_path / name / "ppo" / "policy" / told, written)
        return reproduce(ledger, settings, old, tmp_path / name).different

    assert different("again", {"eos_token_id": [4, 1], "pad_token_id": 0}) == ()
    assert different("others", {"eos_token_id": 4, "pad_token_id": 0}) == (told,)


def test_each_stage_is_given_what_it_was_on_the_day(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe may be corrected between them, and no later step knows what the earlier one read."""
    version, ledger = loop.version(first_turn.agent_id, 1), loop.pipeline.ledger
    assert "stage_recipes" not in version.lineage  # all of it was trained with one recipe
    turn = replace(
        loop.pipeline._turn(loop.pipeline.claims.history(first_turn.agent_id)[0]),
        work=tmp_path / "turn",
    )
    for stage, seed in (("baseline", 3), ("reward", 5)):
        training = turn.settings.training.model_copy(update={"seed": seed})
        given = replace(turn, settings=turn.settings.model_copy(update={"training": training}))
        write_json(turn.work / f"{stage}.spec.json", specification(given))
    write_json(turn.work / "ppo.spec.json", specification(turn))
    lineage = loop.pipeline.lineage(turn)
    assert lineage["seed"] == lineage["recipe"]["training"]["seed"] == 0
    found: dict[str, int] = {}

    def run(turn: stages.Turn, *_: object, stage: str) -> None:
        found[stage] = turn.settings.training.seed

    for stage in stages.STAGES:
        monkeypatch.setitem(stages.STAGES, stage, partial(run, stage=stage))
    for number in (0, 1):
        then = loop.version(first_turn.agent_id, number)
        told = {**then.lineage, "stage_recipes": lineage["stage_recipes"]}
        work = tmp_path / str(number)
        for folder in (work / "sft", work / "ppo" / "policy"):
            folder.mkdir(parents=True)
        settings = loop.pipeline.settings(first_turn.agent_id)
        reproduce(ledger, settings, replace(then, lineage=told), work)
    assert found == {"baseline": 3, "reward": 5, "ppo": 0}


@pytest.mark.slow
def test_another_seed_is_found_out(loop: Loop, first_turn: FirstTurn, tmp_path: Path) -> None:
    version = loop.version(first_turn.agent_id, 1)
    recipe = {**version.lineage["recipe"], "training": {"seed": 5, "watch_prompts": 8}}
    recipe["ppo"] = {**recipe["ppo"], "seed": 5}
    other = replace(version, lineage={**version.lineage, "recipe": recipe})
    settings = loop.pipeline.settings(first_turn.agent_id)
    outcome = reproduce(loop.pipeline.ledger, settings, other, tmp_path / "work")
    assert outcome.different == ("model.safetensors",)


def test_erased_rows_are_said_before_anything_is_trained(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    version = loop.version(first_turn.agent_id, 1)
    settings = loop.pipeline.settings(first_turn.agent_id)
    data = {**version.lineage["data"], stages.PAIRS: "0" * 64}
    other = replace(version, lineage={**version.lineage, "data": data})
    with pytest.raises(HashMismatch, match=r"pairs\.jsonl\.gz is not the file version 1"):
        recorded_turn(loop.pipeline.ledger, settings, other, tmp_path)
    gone = replace(version, lineage={**version.lineage, "data": {"gone.jsonl": "0" * 64}})
    with pytest.raises(RegistryError, match="restore it from a backup"):
        recorded_turn(loop.pipeline.ledger, settings, gone, tmp_path)


def test_data_sets_of_a_release_that_did_not_pack_them_are_found(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    version, ledger = loop.version(first_turn.agent_id, 1), loop.pipeline.ledger
    settings = loop.pipeline.settings(first_turn.agent_id)
    now = recorded_turn(ledger, settings, version, tmp_path / "work")
    elsewhere = settings.model_copy(update={"state_dir": tmp_path})
    old = elsewhere.agent_folder(version.agent_id) / "snapshots" / now.data.name
    old.mkdir(parents=True)
    began = loop.version(first_turn.agent_id, 0).path
    shutil.copytree(began, tmp_path / began.relative_to(loop.state.resolve()))
    data = {}
    for packed in now.data.glob("*.jsonl.gz"):
        plain = old / packed.stem
        plain.write_bytes(gzip.decompress(packed.read_bytes()))
        data[plain.name] = file_sha256(plain)
    then = replace(version, lineage={**version.lineage, "data": data})
    turn = recorded_turn(ledger, elsewhere, then, tmp_path / "work")
    assert turn.data == old
    assert len(data) == 4
    prompts = stages.training_prompts(turn)
    assert prompts == stages.training_prompts(now)
    assert offline._trained_on(elsewhere, then) >= set(map(conversation_of, prompts))


def test_reward_models_of_the_turn_before_are_found_or_said_to_be_gone(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    """A turn that may begin from them comes out otherwise without."""
    version, ledger = loop.version(first_turn.agent_id, 1), loop.pipeline.ledger
    settings = loop.pipeline.settings(first_turn.agent_id)
    assert version.lineage["previous"] is None  # nothing of this recipe looks back
    recipe = dict(version.lineage["recipe"])
    recipe["reward"] = {**recipe["reward"], "warm_start": True}
    before = Path(recipe["state_dir"]) / "before"

    def turn(**lineage: object) -> stages.Turn:
        kept = {k: v for k, v in version.lineage.items() if k != "previous"}
        told = replace(version, lineage={**kept, "recipe": recipe, **lineage})
        return recorded_turn(ledger, settings, told, tmp_path)

    with pytest.raises(RegistryError, match="no word of that turn in its lineage"):
        turn()
    with pytest.raises(RegistryError, match="restore them from a backup"):
        turn(previous=str(before))
    assert turn(previous=None).previous is None
    for job in JOBS:
        shutil.copytree(first_turn.work / "reward" / job, before / "reward" / job)
    assert turn(previous=str(before)).previous == before
    for weights in before.glob("reward/gate/trunk"):  # as retention takes them
        shutil.rmtree(weights)
    with pytest.raises(RegistryError, match="found no whole gate there"):
        turn(previous=str(before))


def test_a_turn_after_one_that_only_trained_version_0_began_from_no_reward_models(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    turn = loop.pipeline._turn(loop.pipeline.claims.history(first_turn.agent_id)[0])
    reward = turn.settings.reward.model_copy(update={"warm_start": True})
    settings = turn.settings.model_copy(update={"reward": reward})
    second = replace(turn, settings=settings, previous=tmp_path)
    assert loop.pipeline.lineage(second)["previous"] is None
    (tmp_path / "reward").mkdir()
    assert loop.pipeline.lineage(second)["previous"] == str(tmp_path)


def test_a_policy_it_began_from_that_is_another_is_said_before_anything_is_trained(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    version, ledger = loop.version(first_turn.agent_id, 1), loop.pipeline.ledger
    settings = loop.pipeline.settings(first_turn.agent_id)
    moved = settings.model_copy(update={"state_dir": tmp_path / "moved"})
    snapshots = moved.agent_folder(version.agent_id) / "snapshots"
    shutil.copytree(recorded_turn(ledger, settings, version, tmp_path).data.parent, snapshots)
    began = loop.version(first_turn.agent_id, 0).path
    champion = moved.state_dir / began.relative_to(loop.state.resolve())

    def turn(exact: bool = True, told: ModelVersion = version) -> stages.Turn:
        return recorded_turn(ledger, moved, told, tmp_path / "work", exact=exact)

    with pytest.raises(RegistryError, match=r"/sft, found no .*restore it from a backup"):
        turn()
    shutil.copytree(began, champion)
    assert turn().champion == champion
    weights = champion / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # one bit
    with pytest.raises(HashMismatch, match=r"/sft, found model\.safetensors changed or added"):
        turn()
    assert turn(exact=False).champion == champion
    weights.unlink()
    with pytest.raises(RegistryError, match=r"found no model\.safetensors there; restore"):
        turn()
    weights.write_bytes(whole)
    # And the reward models of the turn before, where it may have begun from them.
    work = moved.state_dir / first_turn.work.resolve().relative_to(loop.state.resolve())
    shutil.copytree(first_turn.work / "reward", work / "reward")
    recipe = dict(version.lineage["recipe"])
    recipe["reward"] = {**recipe["reward"], "warm_start": True}
    lineage = {**version.lineage, "recipe": recipe, "previous": str(first_turn.work.resolve())}
    later = replace(version, lineage=lineage)
    assert turn(told=later).previous == work
    with next((work / "reward" / "gate").glob("head*")).open("ab") as head:
        head.write(b"0")
    with pytest.raises(HashMismatch, match="the gate reward model of version 1"):
        turn(told=later)


def test_a_version_without_a_turn_says_so(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    version = replace(loop.version(first_turn.agent_id, 1), lineage={"base": "tiny"})
    settings = loop.pipeline.settings(first_turn.agent_id)
    with pytest.raises(RegistryError, match="recipe, fingerprint, watermark"):
        recorded_turn(loop.pipeline.ledger, settings, version, tmp_path)


def test_a_recorded_setting_that_is_no_more_is_named_or_left_out(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    """Nobody can train with it again; what explains or goes on from a version can do without."""
    version = loop.version(first_turn.agent_id, 1)
    settings, ledger = loop.pipeline.settings(first_turn.agent_id), loop.pipeline.ledger
    before = recorded_turn(ledger, settings, version, tmp_path).settings
    recipe = dict(version.lineage["recipe"])
    for section in ("evaluation", "ppo"):
        recipe[section] = {**recipe[section], "of_last_year": 1}
    old = replace(version, lineage={**version.lineage, "recipe": recipe})
    with pytest.raises(
        RegistryError, match=r"evaluation\.of_last_year, ppo\.of_last_year not among"
    ):
        recorded_turn(ledger, settings, old, tmp_path)
    with capture_logs() as lines:
        assert recorded_turn(ledger, settings, old, tmp_path, exact=False).settings == before
    assert [line["settings"] for line in lines] == ["evaluation.of_last_year, ppo.of_last_year"]
    recipe["evaluation"] = {**version.lineage["recipe"]["evaluation"], "prompts": "many"}
    with pytest.raises(RegistryError, match=r"evaluation\.prompts"):
        recorded_turn(ledger, settings, old, tmp_path, exact=False)


def test_a_moved_state_folder_still_finds_where_training_began(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    version = loop.version(first_turn.agent_id, 1)
    settings = loop.pipeline.settings(first_turn.agent_id)
    moved = settings.model_copy(update={"state_dir": tmp_path / "moved"})
    recipe = version.lineage["recipe"]
    reward = {**recipe["reward"], "given": f"{recipe['state_dir']}/models"}
    lineage = {**version.lineage, "data": {}, "recipe": {**recipe, "reward": reward}}
    began = loop.version(first_turn.agent_id, 0).path
    moved_to = moved.state_dir / began.relative_to(loop.state.resolve())
    shutil.copytree(began, moved_to)
    turn = recorded_turn(
        loop.pipeline.ledger, moved, replace(version, lineage=lineage), tmp_path / "work"
    )
    assert turn.champion == turn.baseline == moved_to
    assert turn.settings.reward.given == str(moved.state_dir / "models")
    assert turn.settings.policy.base == recipe["policy"]["base"]
    assert turn.settings.state_dir == tmp_path / "moved"
