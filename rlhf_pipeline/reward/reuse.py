"""Reward models of an earlier turn: begun from, or used as they are while people vote as they say.

What this does not tell: whether an earlier model is right about what nobody voted on since.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.files import new_folder, read_json, write_json
from rlhf_pipeline.records import PreferencePair, RewardFunction, RewardInput
from rlhf_pipeline.reward import HEAD, RATERS, REPORT, SETTINGS, TRUNK, WORST, missing_from
from rlhf_pipeline.reward.calibration import hangs_on
from rlhf_pipeline.reward.held_out import FEWEST, Measured, measured
from rlhf_pipeline.reward.model import (
    TRAINED_FROM,
    RewardModel,
    base_source,
    inner_trunk,
    load_trunk,
)

OTHERWISE = "the earlier model is made otherwise"


def is_whole(folder: Path) -> bool:
    """Say whether a reward model and its report are there; retention may have left the report."""
    return not missing_from(folder) and (folder / REPORT).exists()


def accuracy_on(reward: RewardFunction, pairs: Sequence[PreferencePair]) -> Measured | None:
    """Return the accuracy on the decided ones of these pairs; None of fewer than FEWEST."""
    decided = [pair for pair in pairs if pair.decided]
    if len(decided) < FEWEST:
        return None
    chosen = reward([RewardInput(pair.prompt, pair.chosen) for pair in decided])
    rejected = reward([RewardInput(pair.prompt, pair.rejected) for pair in decided])
    margins = [better - worse for better, worse in zip(chosen, rejected, strict=True)]
    return measured(margins, [hangs_on(pair) for pair in decided])


def trained_in(folder: Path) -> Path:
    """Return the folder that a model was trained in, used again since or not."""
    return Path(read_json(folder / REPORT).get("reused_from") or folder)


def has_fallen(folder: Path, on_new: Measured | None, most: float) -> bool:
    """Say whether accuracy is more than `most` below what the model was found to have.

    And surely below, by its interval: of few votes since, chance makes a fall of a tenth.
    """
    before = float(read_json(folder / REPORT)["accuracy"])
    return on_new is not None and on_new.share < before - most and on_new.high < before


def use_again(
    folder: Path, output_dir: Path, on_new: Measured | None, *, is_own: bool
) -> dict[str, Any]:
    """Copy the model whole into output_dir; return its report with where it was trained.

    Of a model that is not the agent's own what names people, their words and topics is left out:
    an erasure from the agent they spoke to would not reach the copy.
    Raises ModelError where it is not whole, or the base it reads with is gone.
    """
    if not is_whole(folder):
        raise ModelError(
            f"a reward model with its report is needed at {folder}, found none; correct "
            "reward.given, or leave it out and train one"
        )
    settings = read_json(folder / SETTINGS)
    report = {
        **read_json(folder / REPORT),
        "path": str(output_dir),
        "reused_from": str(trained_in(folder)),
        "on_new_votes": None if on_new is None else asdict(on_new),
    }
    left_out = shutil.ignore_patterns(*(() if is_own else (RATERS, WORST)))
    if not is_own and report.get("findings"):
        report["findings"] = {**report["findings"], "by_topic": {}, "worst": []}
    with new_folder(output_dir) as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True, ignore=left_out)
        if settings.get("base"):
            source = base_source(settings["base"], folder)
            if isinstance(source, Path):  # said from where the model lies
                there = os.path.relpath(source.resolve(), output_dir.parent.resolve())
                write_json(
                    copy / SETTINGS, {**settings, "base": {**settings["base"], "path": there}}
                )
        write_json(copy / REPORT, report)
    return report


def begin_with(model: RewardModel, folder: Path) -> str | None:
    """Give an untrained model an earlier one's trunk, or adapters, and head; None: it has them.

    Else why not, and nothing is taken: that is not whole, is made otherwise, or was trained from
    another base. One that does not say from which counts as of another.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file

    from rlhf_pipeline.policy.adapters import WEIGHTS, base_digest, only

    if not is_whole(folder):
        return f"found no whole reward model at {folder}"
    settings = read_json(folder / SETTINGS)
    made = (model.encoder, model.reads, model.likelihood, model.base is None)
    facts = settings.get("base")
    if made != (*(settings[n] for n in ("encoder", "reads", "likelihood")), facts is None):
        return OTHERWISE
    head = load_file(folder / HEAD)
    if not _alike(model.head.state_dict(), head):
        return OTHERWISE
    source = model.source if model.base is None else model.base
    began_as = settings.get(TRAINED_FROM) if facts is None else facts["digest"]
    if source is None or base_digest(source) != began_as:
        return f"the earlier model was trained from another base than {source}"
    if model.base is None:
        trunk = load_trunk(folder / TRUNK, model.likelihood, "float32").state_dict()
        if not _alike(model.trunk.state_dict(), trunk):
            return OTHERWISE
        model.trunk.load_state_dict(trunk)
    elif model.adapters is None or not (folder / TRUNK / WEIGHTS).exists():
        return "a head alone is fitted anew, whatever it begins with"
    else:
        inner: Any = inner_trunk(model)
        adapters = load_file(folder / TRUNK / WEIGHTS)
        own = get_peft_model_state_dict(
            inner, adapter_name=model.adapters, save_embedding_layers=False
        )
        if not _alike(own, adapters):
            return OTHERWISE
        with only(inner, model.adapters):
            set_peft_model_state_dict(inner, adapters, adapter_name=model.adapters)
    model.head.load_state_dict(head)
    return None


def _alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return {n: t.shape for n, t in one.items()} == {n: t.shape for n, t in other.items()}
