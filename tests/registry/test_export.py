"""Exports read the ledger and the files; MLflow is not needed where the folder is at hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlhf_pipeline.database import Database
from rlhf_pipeline.errors import HashMismatch, RegistryError
from rlhf_pipeline.files import folder_sha256
from rlhf_pipeline.policy.loading import load_policy, save_policy
from rlhf_pipeline.policy.tiny import build_tiny
from rlhf_pipeline.registry.export import export
from rlhf_pipeline.registry.ledger import PromotionLedger
from rlhf_pipeline.registry.models import ModelRegistry

AGENT = "support"


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[ModelRegistry]:
    database = Database(f"sqlite:///{tmp_path}/store.db")
    ledger = PromotionLedger(database, root=tmp_path)
    policy = build_tiny(["a b"], vocabulary=270, layers=1, width=16, heads=2, context=32, seed=0)
    save_policy(policy, tmp_path / "baseline")
    ledger.add_baseline(
        AGENT,
        label="v0",
        path=tmp_path / "baseline",
        files=folder_sha256(tmp_path / "baseline"),
        lineage={},
        actor="test",
    )
    yield ModelRegistry(ledger, f"sqlite:///{tmp_path}/mlflow.db", tmp_path)
    database.close()


def test_an_export_is_the_registered_files_and_loads(
    registry: ModelRegistry, tmp_path: Path
) -> None:
    written = export(registry, AGENT, 0, tmp_path / "out")
    assert written == registry.ledger.version(AGENT, 0).files
    assert load_policy(tmp_path / "out", device="cpu").context_length == 32


def test_an_adapter_is_exported_merged(registry: ModelRegistry, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = load_policy(tmp_path / "baseline", device="cpu")
    model = get_peft_model(base.model, LoraConfig(r=2, target_modules=["q_proj"]))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.5)
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "baseline")
    model.save_pretrained(tmp_path / "adapter")
    version = registry.ledger.add_version(
        AGENT,
        label="v1",
        path=tmp_path / "adapter",
        files=folder_sha256(tmp_path / "adapter"),
        lineage={},
        gate=None,
        fingerprint="f",
    )
    written = export(registry, AGENT, version.version, tmp_path / "out")
    assert "adapter_config.json" not in written
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = model.eval()(ids).logits
        merged = load_policy(tmp_path / "out", device="cpu").model(ids).logits
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-5)


def test_changed_files_and_full_folders_are_refused(
    registry: ModelRegistry, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    with pytest.raises(RegistryError, match="empty folder"):
        export(registry, AGENT, 0, tmp_path / "full")
    assert (tmp_path / "full" / "mine.txt").read_text() == "keep"
    (tmp_path / "baseline" / "config.json").write_text("{}")
    with pytest.raises(HashMismatch, match=r"config\.json"):
        export(registry, AGENT, 0, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_that_change_while_they_are_copied_are_noticed(
    registry: ModelRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = registry.folder_of

    def check_then_change(version: object) -> Path:
        folder = checked(registry.ledger.version(AGENT, 0))
        (folder / "config.json").write_text("{}")
        return folder

    monkeypatch.setattr(registry, "folder_of", check_then_change)
    with pytest.raises(HashMismatch, match="export again"):
        export(registry, AGENT, 0, tmp_path / "out")
    assert not (tmp_path / "out").exists()
