"""Models to start from, out of a real local registry."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from rlhf_pipeline.config import RECIPES, PolicySettings, Settings
from rlhf_pipeline.errors import HashMismatch, ModelError, RegistryError
from rlhf_pipeline.policy.adapters import base_digest
from rlhf_pipeline.policy.loading import load_policy, save_policy
from rlhf_pipeline.policy.tiny import build_tiny
from rlhf_pipeline.registry.bases import base_folder, both_told, held_against
from rlhf_pipeline.registry.models import ModelRegistry
from rlhf_pipeline.stages import Turn, base_source, train_baseline

FOREIGN = "our-base"


def settings_with(state: Path, base: str, **sections: object) -> Settings:
    lengths = {"max_prompt_tokens": 24, "max_completion_tokens": 8}
    policy = {"base": base, "device": "cpu", **lengths}
    here = {"state_dir": str(state), "database_url": f"sqlite:///{state}/store.db"}
    return Settings.model_validate({**here, "policy": policy, "ppo": lengths, **sections})


@pytest.fixture(scope="module")
def bases(registry: ModelRegistry) -> ModelRegistry:
    """The registry with an agent's version 0, and a model that no ledger knows, alias `good`."""
    state = registry.folder.parent
    policy = build_tiny(["a b"], vocabulary=270, layers=1, width=16, heads=2, context=64, seed=0)
    save_policy(policy, state / "v0")
    first = registry.register_baseline("demo", state / "v0", label="v0", lineage={}, actor="test")
    assert first.mlflow_version == "1"
    save_policy(policy, state / "foreign")
    register(registry, state / "foreign")
    registry.client.set_registered_model_alias(FOREIGN, "good", "1")
    return registry


def register(registry: ModelRegistry, folder: Path, **tags: str) -> str:
    """Register a folder as another program would; return the version's number."""
    client = registry.client
    model = client.create_logged_model(registry.experiment("elsewhere"), name=FOREIGN)
    client.log_model_artifacts(model.model_id, str(folder))
    client.finalize_logged_model(model.model_id, "READY")
    if not client.search_registered_models(f"name = '{FOREIGN}'"):
        client.create_registered_model(FOREIGN)
    version = client.create_model_version(FOREIGN, model.artifact_location, tags=tags)
    return str(version.version)


@pytest.mark.parametrize("name", ["rlhf-demo@champion", "rlhf-demo/1", "our-base@good"])
def test_a_registered_model_is_a_policy_to_start_from(bases: ModelRegistry, name: str) -> None:
    settings = settings_with(bases.folder.parent, f"models:/{name}")
    source = base_source(settings)
    assert source is not None
    assert load_policy(source, device="cpu").context_length == 64


def test_changed_files_are_refused(bases: ModelRegistry, tmp_path: Path) -> None:
    path = bases.folder.parent / "v0" / "config.json"
    before = path.read_text()
    path.write_text(before + " ")
    with pytest.raises(HashMismatch, match=r"version 0 of agent demo needs the files"):
        base_folder(bases, "models:/rlhf-demo@champion")
    path.write_text(before)
    (tmp_path / "config.json").write_text("{}")
    number = register(bases, tmp_path, **{"rlhf.files_digest": "0" * 64})
    with pytest.raises(HashMismatch, match=rf"our-base/{number} needs the files"):
        base_folder(bases, f"models:/our-base/{number}")


def test_what_cannot_be_started_from_says_why(bases: ModelRegistry, tmp_path: Path) -> None:
    for uri, words in (
        ("models:/our-base", "correct policy.base"),
        ("models:/nobody@champion", "finding models:/nobody@champion needs MLflow to agree"),
        ("models:/our-base/99", "finding models:/our-base/99 needs MLflow"),
        ("models:/rlhf-demo@golden", "found no 'golden'"),
    ):
        with pytest.raises(RegistryError, match=words):
            base_folder(bases, uri)
    (tmp_path / "MLmodel").write_text("flavors: {}")
    number = register(bases, tmp_path)
    with pytest.raises(RegistryError, match=r"needs a plain transformers folder .* found MLmodel"):
        base_folder(bases, f"models:/our-base/{number}")
    (tmp_path / "model.pkl").write_text("x")
    number = register(bases, tmp_path)
    with pytest.raises(RegistryError, match=r"safetensors and JSON is needed, found model\.pkl"):
        base_folder(bases, f"models:/our-base/{number}")
    with pytest.raises(ModelError, match=r"name it as policy\.base"):
        load_policy("models:/our-base@good")


def test_a_base_is_the_same_wherever_it_lies_and_however_it_is_named(
    bases: ModelRegistry, tmp_path: Path
) -> None:
    state = bases.folder.parent

    def held(now: object, then: object, **more: str) -> str:
        return held_against(settings_with(state, str(now)), {"base": str(then), **more})

    foreign, moved, other = state / "foreign", tmp_path / "moved", tmp_path / "other"
    for copy in (moved, other):
        shutil.copytree(foreign, copy)
    (other / "model.safetensors").write_bytes(b"other weights")
    (tmp_path / "link").symlink_to(foreign)
    made = {"started_from": str(foreign), "base_digest": base_digest(foreign)}
    uri = "models:/our-base@good"
    relative = os.path.relpath(foreign, RECIPES.parent)
    for same in (foreign, f"{foreign}/", relative, tmp_path / "link", moved, uri):
        assert held(same, foreign, **made) == "same", same
        assert held(same, relative, **{**made, "started_from": relative}) == "same", same
        assert held(same, uri, **made) == "same", same
    hub = {"started_from": "gpt2", "base_digest": "gpt2"}
    assert held("gpt2", "gpt2", **hub) == "same"
    assert held("tiny", "tiny") == "same"
    assert held_against(settings_with(state, "gpt2"), {}) == "same"  # of an older release

    assert held("gpt2", "tiny") == held(foreign, "tiny") == held("tiny", "gpt2", **hub) == "other"
    assert held(other, foreign, **made) == "other"
    assert held("gpt2-medium", "gpt2", **hub) == "other"

    assert held("openai-community/gpt2", "gpt2", **hub) == "?"
    assert held(moved, "gpt2", **hub) == held("gpt2", foreign, **made) == "?"
    assert held(moved, foreign) == "?"  # of a release that recorded no weights


def test_other_sizes_of_the_tiny_policy_are_another_base(tmp_path: Path) -> None:
    settings = settings_with(tmp_path, "tiny")
    policy = settings.policy.model_dump()
    made = {"base": "tiny", "recipe": {"policy": policy}}
    assert held_against(settings, made) == "same"
    policy["tiny"] |= {"layers": 2, "heads": 8}
    assert held_against(settings, made) == "other"
    told = both_told(settings, "tea", made)
    assert "needed policy.tiny.layers 2, policy.tiny.heads 8, which version 0 of 'tea'" in told
    assert told.endswith("found 4, 4")
    gpt2 = settings_with(tmp_path, "gpt2")
    assert "policy.base 'tiny', which" in both_told(gpt2, "tea", made)

    policy["tiny"] |= {"encoding": "tiktoken:gpt2"}
    encoded = {"tiny": policy["tiny"] | {"vocabulary": 500}}  # says nothing beside an encoding
    settings = settings.model_copy(update={"policy": PolicySettings.model_validate(encoded)})
    assert held_against(settings, made) == "same"


@pytest.mark.slow
def test_version_0_is_trained_on_a_registered_model_and_says_which(
    bases: ModelRegistry, tmp_path: Path
) -> None:
    seeds = tmp_path / "seeds.jsonl"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    seeds.write_text("".join(json.dumps({"messages": talk}) + "\n" for _ in range(4)))
    settings = settings_with(
        bases.folder.parent,
        "models:/our-base@good",
        sft={"seed_conversations": str(seeds), "epochs": 1, "batch_size": 2},
    )
    work = tmp_path / "work"
    turn = Turn("new", "print", 0, 0, tmp_path, work, None, None, settings)
    result = train_baseline(turn, lambda facts: None, lambda: None)
    assert load_policy(result["path"], device="cpu").context_length == 64
    assert result["base"]["started_from"] == str(base_source(settings))
    assert len(result["base"]["base_digest"]) == 32
