"""A registered version trained again from what its lineage names, and compared byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from rlhf_pipeline import stages
from rlhf_pipeline.config import UNKNOWN, Settings, without
from rlhf_pipeline.errors import HashMismatch, RegistryError
from rlhf_pipeline.feedback.datasets import JOBS
from rlhf_pipeline.feedback.raters import erased_rows
from rlhf_pipeline.files import file_sha256, folder_sha256, read_json
from rlhf_pipeline.records import Progress, ignore_progress
from rlhf_pipeline.registry.comparison import by_place, version_at
from rlhf_pipeline.registry.judges import reward_folder
from rlhf_pipeline.registry.ledger import ModelVersion, PromotionLedger

WEIGHTS = ".safetensors"
BASE = "base_model_name_or_path"
ADAPTERS = "adapter/adapter_config.json"  # of a version that kept its adapters
SETS = "adapter/adapter_model.safetensors"  # their weights
GENERATION = "generation_config.json"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # what it says of

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Reproduction:
    """What came out of training a version again."""

    version: int
    folder: Path
    same: tuple[str, ...]  # files equal to the registered ones
    different: tuple[str, ...]  # files that are not, or are missing
    erased: int = 0  # rows erased from its snapshot since; none that it was trained on

    @property
    def is_exact(self) -> bool:
        """Return whether every registered file came out byte for byte."""
        return not self.different


def reproduce(
    ledger: PromotionLedger,
    settings: Settings,
    version: ModelVersion,
    work: Path,
    report: Progress = ignore_progress,
) -> Reproduction:
    """Train the version again, into the new folder `work`, from its snapshot, recipe and seeds.

    Exact on the CPU of the machine, thread count and library versions it was trained with; a GPU's
    sums, or another processor's, round otherwise, and a chat template that reads the clock writes
    another day. Raises RegistryError where the lineage does not say enough or a file it names is
    gone, HashMismatch where one is not the one it names.
    """
    turn = recorded_turn(ledger, settings, version, work)
    names = ("reward", "ppo") if turn.champion else ("baseline",)
    for name in names:
        given = _recorded_settings(version, settings, exact=True, stage=name)
        own = _without_what_is_never_asked(replace(turn, settings=given))
        stages.STAGES[name](own, lambda facts, name=name: report({"stage": name, **facts}), _go_on)  # type: ignore[misc]
    folder = work / "ppo" / "policy" if turn.champion else work / "sft"
    found = folder_sha256(folder)
    for name, says_the_same in (
        (ADAPTERS, _describes_the_same),
        (SETS, _holds_the_same),
        (GENERATION, _names_the_same_tokens),
    ):
        sha256, registered = version.files.get(name), version.path / name
        if sha256 is None or found.get(name) in (None, sha256) or not registered.is_file():
            continue
        if file_sha256(registered) == sha256 and says_the_same(registered, folder / name):
            found[name] = sha256
    same = tuple(name for name, sha256 in version.files.items() if found.get(name) == sha256)
    different = tuple(name for name in version.files if name not in same)
    erased = erased_rows(ledger.database, version.agent_id, version.fingerprint)
    return Reproduction(version.version, folder, same, different, erased)


def _without_what_is_never_asked(turn: stages.Turn) -> stages.Turn:
    """Return the turn without the services and models that a reproduction never asks.

    A stage looks for what later ones need, such as their keys: here none gives a verdict, and none
    follows version 0.
    """
    settings = turn.settings
    evaluation = settings.evaluation.model_copy(update={"judge": None})
    reward = settings.reward
    if turn.champion is None:
        reward = reward.model_copy(update={"functions": {}, "given": None})
    changes = {"evaluation": evaluation, "reward": reward}
    return replace(turn, settings=settings.model_copy(update=changes))


def _describes_the_same(registered: Path, written: Path) -> bool:
    """Return whether the adapters that were written are described as the registered ones are.

    Earlier releases wrote the names of their layers in an order of each process's own; and where
    the base lies, which base.json tells by its digest, is another place in a restored state.
    """
    from rlhf_pipeline.policy.adapters import described

    then, now = (described(path.parent) for path in (registered, written))
    return then == {**now, BASE: then.get(BASE)}


def _holds_the_same(registered: Path, written: Path) -> bool:
    """Return whether the policy's set that was written is the registered one, byte for byte.

    Earlier releases kept beside it the sets of a critic and of reward models on the same base,
    these under names of each run's own, which stand before `weight`.
    """
    from safetensors.numpy import load_file

    then, now = load_file(registered), load_file(written)
    own = {n: w for n, w in then.items() if n.endswith((".lora_A.weight", ".lora_B.weight"))}
    return own.keys() == now.keys() and all(own[n].tobytes() == now[n].tobytes() for n in own)


def _names_the_same_tokens(registered: Path, written: Path) -> bool:
    """Return whether the tokens that begin, fill and end are those of the registered file.

    Earlier releases kept beside them how a base's makers sample, which nothing here reads, and
    wrote an end token twice.
    """
    then, now = read_json(registered), read_json(written)
    for told in (then, now):
        ends = told.get("eos_token_id")
        told["eos_token_id"] = set(ends if isinstance(ends, list) else [ends])
    return all(then.get(name) == now.get(name) for name in TOKENS)


def recorded_turn(
    ledger: PromotionLedger,
    settings: Settings,
    version: ModelVersion,
    work: Path,
    *,
    exact: bool = True,
) -> stages.Turn:
    """Return the turn the version came from, its outcome going to `work`.

    Files are looked for in today's state folder, so a restored one serves; they are checked
    against the hashes of the day. Unless `exact`, what erasures have left of them will do, and so
    will what this release still knows of the recipe.
    """
    lineage = version.lineage
    missing = [key for key in ("recipe", "fingerprint", "watermark") if lineage.get(key) is None]
    if missing:
        raise RegistryError(
            f"version {version.version} of {version.agent_id} has no {', '.join(missing)} in its "
            "lineage, so nobody knows what to train; only versions of a turn can be reproduced"
        )
    recipe = _recorded_settings(version, settings, exact=exact)
    fingerprint = str(lineage["fingerprint"])
    data = settings.agent_folder(version.agent_id) / "snapshots" / fingerprint[:16]
    erased = erased_rows(ledger.database, version.agent_id, fingerprint)
    for name, sha256 in lineage.get("data", {}).items():
        path = data / name
        if not path.is_file():
            raise RegistryError(
                f"version {version.version} of {version.agent_id} was trained from {path}, found "
                "none there; restore it from a backup"
            )
        if file_sha256(path) == sha256 or (erased and not exact):
            continue
        if erased:
            raise HashMismatch(
                f"{erased} rows erased from the snapshot of version {version.version} of "
                f"{version.agent_id} on people's request, {name} among what they were in; what it "
                "learned cannot be learned again bit for bit, so train a new version"
            )
        raise HashMismatch(
            f"{path} is not the file version {version.version} was trained from, and no erasure "
            "is known; somebody wrote to it: restore it from a backup"
        )
    old_state = str(lineage["recipe"]["state_dir"])
    # What version 0 started from is a base model: no reward was asked, and it was no champion.
    is_trained = bool(lineage.get("reward_models"))
    started_from = lineage.get("started_from") if is_trained else None
    champion = _moved(started_from, old_state, settings)
    previous = _moved(lineage.get("previous"), old_state, settings)
    first = ledger.baseline(version.agent_id)
    recorded = _moved(lineage.get("baseline"), old_state, settings)
    baseline = recorded or (first.path if first and champion else None)
    if exact:
        known = by_place(ledger.versions(version.agent_id))
        if is_trained:
            _check_previous(version, recipe, previous, known)
        if lineage.get("base_digest") is not None:
            _check_base(version, recipe)
        for folder in dict.fromkeys((champion, baseline)):
            if folder is not None:
                _check_began_from(version, folder, known)
    return stages.Turn(
        agent_id=version.agent_id,
        fingerprint=fingerprint,
        watermark=int(lineage["watermark"]),
        token=int(lineage.get("token", 0)),
        data=data,
        work=work,
        baseline=baseline,
        champion=champion,
        settings=recipe,
        previous=previous,
    )


def _check_base(version: ModelVersion, recipe: Settings) -> None:
    """Raise RegistryError where the base's folder is gone, HashMismatch where its weights are not
    those that the version began from.
    """
    from rlhf_pipeline.policy.adapters import is_recorded_base

    source = stages.base_source(recipe)
    if source is None or is_recorded_base(source, version.lineage["base_digest"]):
        return
    needs = f"version {version.version} of {version.agent_id} needs the base it was trained from"
    if not Path(source).is_dir():
        raise RegistryError(f"{needs}, found no folder at {source}; restore it from a backup")
    raise HashMismatch(
        f"{needs}, found other weights at {source}; put those back, or train a new version"
    )


def _check_began_from(
    version: ModelVersion, folder: Path, known: Mapping[str, ModelVersion]
) -> None:
    """Raise RegistryError where files of a policy that training reads are gone, HashMismatch where
    they are not those that were registered. `known` are the agent's versions by place.
    """
    earlier = version_at(folder, known)
    found = folder_sha256(folder) if folder.is_dir() else {}
    files = found if earlier is None else earlier.files
    gone = sorted(files.keys() - found.keys())
    which = f"version {version.version} of {version.agent_id}"
    if gone or not found:
        raise RegistryError(
            f"{which} was trained from the policy at {folder}, found no "
            f"{', '.join(gone[:5]) or 'files'} there; restore it from a backup"
        )
    if odd := sorted(name for name in found if found[name] != files.get(name)):
        raise HashMismatch(
            f"{which} was trained from the policy at {folder}, found {', '.join(odd[:5])} changed "
            "or added there since it was registered; restore it from a backup"
        )


def _check_previous(
    version: ModelVersion,
    recipe: Settings,
    previous: Path | None,
    known: Mapping[str, ModelVersion],
) -> None:
    """Raise RegistryError where reward models came of the turn before, and nobody has them now.

    Retention may have left their reports. HashMismatch where they are others; `known` are the
    agent's versions.
    """
    from rlhf_pipeline.reward.reuse import is_whole

    which = f"version {version.version} of {version.agent_id}"
    if recipe.reward.looks_back and "previous" not in version.lineage:
        raise RegistryError(
            f"{which} may have begun from the reward models of the turn before "
            "(reward.retrain_drop, reward.warm_start), found no word of that turn in its lineage; "
            "versions that are trained from now on have it"
        )
    gone = [] if previous is None else [j for j in JOBS if not is_whole(previous / "reward" / j)]
    if previous is not None and gone:
        raise RegistryError(
            f"{which} began from the reward models at {previous / 'reward'}, found no whole "
            f"{', '.join(gone)} there; restore them from a backup"
        )
    policy = None if previous is None else previous / "ppo" / "policy"
    if policy is not None and (earlier := version_at(policy, known)) is not None:
        for job in JOBS:
            reward_folder(replace(earlier, path=policy), job)


def newest_turn(ledger: PromotionLedger, settings: Settings, agent_id: str) -> stages.Turn:
    """Return the newest turn that came to a version, under today's settings, champion and baseline.

    Raises RegistryError where no turn has.
    """
    versions = [v for v in ledger.versions(agent_id) if v.lineage.get("reward_models")]
    champion, baseline = ledger.champion(agent_id), ledger.baseline(agent_id)
    if not versions or champion is None or baseline is None:
        raise RegistryError(
            f"needed a turn of agent {agent_id} with reward models, found none; its first turn "
            f"trains them: `make train AGENT={agent_id}`"
        )
    newest = versions[-1]
    turn = recorded_turn(ledger, settings, newest, newest.work, exact=False)
    return replace(turn, settings=settings, champion=champion.path, baseline=baseline.path)


def _recorded_settings(
    version: ModelVersion, today: Settings, *, exact: bool, stage: str = ""
) -> Settings:
    """Return the settings of the day, as a stage was given them; places and secrets are today's.

    Raises RegistryError where this release does not take one, and `exact` or it is not just gone.
    """
    here: dict[str, Any] = {
        "state_dir": today.state_dir,
        "database_url": today.database_url,
        "mlflow_uri": today.mlflow_uri,
        "notifications": {},
    }
    own = version.lineage.get("stage_recipes", {}).get(stage, {})
    recipe = {**version.lineage["recipe"], **own}
    recipe = {**_all_moved(recipe, str(recipe["state_dir"]), today), **here}
    try:
        return Settings.model_validate(recipe)
    except ValidationError as error:
        problems = error.errors()
    names = ", ".join(sorted(".".join(map(str, problem["loc"])) for problem in problems))
    if exact or any(problem["type"] not in UNKNOWN for problem in problems):
        raise RegistryError(
            f"version {version.version} of {version.agent_id} needs the settings it was trained "
            f"with, found {names} not among those of this release; install the release it was "
            "trained with, or train a new version"
        )
    log.warning("settings left out that are no more", version=version.version, settings=names)
    return Settings.model_validate(without(recipe, [problem["loc"] for problem in problems]))


def _moved(path: str | None, old_state: str, settings: Settings) -> Path | None:
    return None if path is None else moved(path, old_state, settings)


def moved(path: str, old_state: str, settings: Settings) -> Path:
    """Return where a file of the old state folder lies in today's."""
    given = Path(path)
    inside = given.is_relative_to(old_state)
    return settings.state_dir / given.relative_to(old_state) if inside else given


def _all_moved(tree: Any, old_state: str, settings: Settings) -> Any:
    """Return the recipe, what it names in the old state folder (models, say) being in today's."""
    if isinstance(tree, Mapping):
        return {key: _all_moved(value, old_state, settings) for key, value in tree.items()}
    if isinstance(tree, str) and Path(tree).is_relative_to(old_state):
        return str(moved(tree, old_state, settings))
    return tree


def _go_on() -> None:
    """A reproduction holds no claim: it writes to a folder of its own and registers nothing."""
