"""The process a training stage runs in: `python -m resources.worker STAGE SPEC.json`.

`--ahead` in their place starts it before there is work: it imports what every stage needs and waits
for a line on standard input that says which stage, so that seconds of imports pass while the run
does something else. It ends without a word when standard input does.

Progress goes to the orchestrator as Dagster Pipes messages and to a file beside the result. It
stops by itself when its parent is gone or its claim is lost, so no orphan keeps training. A stage
that finished under the same specification is not run again, nor any once its version is registered,
whose files it would train over: its result is returned.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from rlhf_pipeline.config import ExperimentSettings, RewardSettings, Settings
from rlhf_pipeline.database import open_database
from rlhf_pipeline.feedback.claims import ClaimBook
from rlhf_pipeline.feedback.datasets import JOBS, place_of
from rlhf_pipeline.fence import writing_while
from rlhf_pipeline.files import file_sha256, folder_sha256, read_json, write_json
from rlhf_pipeline.records import hashed
from rlhf_pipeline.registry.ledger import PromotionLedger
from rlhf_pipeline.stages import DATA_SETS, MAXIMISED_BY, STAGES, Turn, base_source

AHEAD = "--ahead"
IMPORTED_AHEAD: tuple[str, ...] = (
    "rlhf_pipeline.reward.training",
    "rlhf_pipeline.ppo.trainer",
    "rlhf_pipeline.evaluation.compare",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "alembic.command",
)
LAUNCHED = (  # what a launcher tells
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE ACCELERATE_USE_FSDP".split()
)
# Stages that train in vain where PPO's launch is then refused, and for whatever PPO maximises.
BEFORE_PPO = ("baseline", "reward")
GOES_ON_FROM = {"ppo": "reward", "evaluation": "ppo"}  # the stage whose files a stage reads

TRAIN_NOTHING = (
    "alerts continuous_learning notifications pages retention serving".split()
)  # sections of the settings that no stage reads: changed, they leave what was finished as it is
TRAIN_NOTHING_IN: Mapping[str, Collection[str]] = {  # the same of others: the stages read the rest
    # Nor does a stage read the number that stays, but the words few people carried are found by it.
    "experiments": frozenset(ExperimentSettings.model_fields) - {"people_per_network"},
    "promotion": ("automatic", "watch_days"),
    "training": ("stage_timeout_minutes", "dagster_url", "report_to"),
}


def specification(turn: Turn) -> dict[str, Any]:
    """Return the turn as plain values: what `turn_from` reads back."""
    return {
        "agent_id": turn.agent_id,
        "fingerprint": turn.fingerprint,
        "watermark": turn.watermark,
        "token": turn.token,
        "data": str(turn.data),
        "work": str(turn.work),
        "baseline": None if turn.baseline is None else str(turn.baseline),
        "champion": None if turn.champion is None else str(turn.champion),
        "previous": None if turn.previous is None else str(turn.previous),
        "settings": turn.settings.model_dump(mode="json"),
    }


def turn_from(values: Mapping[str, Any]) -> Turn:
    """Return the turn that `specification` wrote."""
    paths = {
        key: None if values[key] is None else Path(values[key])
        for key in ("baseline", "champion", "previous")
    }
    return Turn(
        agent_id=values["agent_id"],
        fingerprint=values["fingerprint"],
        watermark=values["watermark"],
        token=values["token"],
        data=Path(values["data"]),
        work=Path(values["work"]),
        settings=settings_from(values["settings"]),
        **paths,
    )


def settings_from(values: Mapping[str, Any]) -> Settings:
    """Return settings dumped as JSON; a masked secret is taken from the environment again."""
    masked: dict[str, Any] = {
        "database_url": os.environ.get("RLHF_DATABASE_URL"),
        "notifications": {},
    }
    return Settings.model_validate({**values, **masked})


def same_work(stage: str, spec: Mapping[str, Any]) -> str:
    """Return a hash of everything the stage's result depends on (so not the token).

    With the data sets: the same votes may make others, as where gold questions came since. Of what
    the settings only name, and a person may write anew, the contents count; and of the stage that
    this one goes on from, as what work its files were left.
    """
    parts = {key: value for key, value in spec.items() if key != "token"}
    settings = settings_from(spec["settings"])
    parts["settings"] = _that_train(stage, spec["settings"], settings.reward)
    every = [place_of(Path(spec["data"]) / name) for name in DATA_SETS]
    sets = {path.name: file_sha256(path) for path in every if path.exists()}
    before = Path(spec["work"]) / f"{GOES_ON_FROM.get(stage)}.json"
    goes_on_from = read_json(before)["work"] if before.exists() else None
    read = [parts, sets, _read_besides(stage, spec, settings), goes_on_from]
    return hashed(stage, json.dumps(read, sort_keys=True))


def _read_besides(stage: str, spec: Mapping[str, Any], settings: Settings) -> list[str]:
    """Return digests of what a stage reads that lies in no folder of the turn.

    Each file is read once more than the stage reads it itself, so that costs little beside that.
    """
    base: str | Path | None = None
    files: list[Path] = []
    digests: list[str] = []
    if stage == "baseline":
        files = [Path(settings.sft.seed_conversations or "")]
        base = base_source(settings)
    elif stage == "reward":
        base = settings.reward.base
        if settings.reward.given is not None:  # whose reports are taken over as well
            given = [Path(settings.reward.given) / job for job in JOBS]
            digests = [json.dumps(folder_sha256(each)) for each in given if each.is_dir()]
    elif stage == "ppo":
        from rlhf_pipeline.reward.named import written_versions

        digests = written_versions(settings.reward.functions)
    elif stage == "evaluation":
        from rlhf_pipeline.evaluation.behaviour import OWN_ITEMS

        files = [settings.agent_folder(spec["agent_id"]) / OWN_ITEMS]
    if base is not None:
        from rlhf_pipeline.policy.adapters import base_digest

        digests.append(base_digest(base))
    return digests + [file_sha256(path) for path in files if path.is_file()]


def _that_train(stage: str, settings: Mapping[str, Any], reward: RewardSettings) -> dict[str, Any]:
    from rlhf_pipeline.reward.named import as_scored

    kept = {name: value for name, value in settings.items() if name not in TRAIN_NOTHING}
    for section, names in TRAIN_NOTHING_IN.items():
        kept[section] = {n: value for n, value in settings[section].items() if n not in names}
    scored = reward.model_copy(update={"functions": as_scored(reward.functions)})
    unread = set(MAXIMISED_BY) if stage in BEFORE_PPO else None
    kept["reward"] = scored.model_dump(mode="json", exclude=unread)
    return kept


def run(stage: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Run one stage, or return the result it left under the same specification.

    Of several processes launched together all train PPO and one runs the rest; one reports. Raises
    ConfigError for a launch that PPO refuses, whose stage may come later.
    """
    turn = turn_from(spec)
    is_main = int(os.environ.get("RANK", "0")) == 0
    is_dpo = turn.settings.ppo.estimator == "dpo"
    if stage != "ppo" or is_dpo:
        if not is_main:
            return {}
        if stage in BEFORE_PPO and not is_dpo:
            from rlhf_pipeline.ppo.processes import check_launch

            check_launch(turn.settings.ppo)
        for name in LAUNCHED:  # trainers of other libraries would wait for the others
            os.environ.pop(name, None)
    turn.work.mkdir(parents=True, exist_ok=True)
    result_path = turn.work / f"{stage}.json"
    work = same_work(stage, spec)
    if result_path.exists():
        earlier = read_json(result_path)
        if earlier["work"] == work or _is_registered(turn):
            return dict(earlier["result"])
    claims = ClaimBook(open_database(turn.settings.resolved_database_url))
    progress_path = turn.work / f"{stage}.progress.jsonl"
    shown = progress_path if is_main else Path(os.devnull)
    told = _pipes() if is_main else nullcontext()
    with shown.open("a", encoding="utf-8") as progress, told as pipes:

        def report(facts: Mapping[str, float | int | str]) -> None:
            progress.write(json.dumps({"at": time.time(), **facts}) + "\n")
            progress.flush()
            if pipes is not None:
                pipes.report_custom_message(dict(facts))

        def keep_going() -> None:
            claims.check(turn.token)

        keep_going()  # before seconds of imports
        with writing_while(keep_going):
            result = STAGES[stage](turn, report, keep_going)
            keep_going()
            if is_main:
                write_json(result_path, {"work": work, "result": result})
    return result


def _is_registered(turn: Turn) -> bool:
    """Say whether what this turn trained is a version already."""
    database = open_database(turn.settings.resolved_database_url)
    ledger = PromotionLedger(database, turn.settings.state_dir)
    policy = (turn.work / "ppo" / "policy").resolve()
    return any(v.path.resolve() == policy for v in ledger.versions(turn.agent_id))


def _pipes() -> Any:
    """Return the Pipes session, or a context of None where nobody orchestrates."""
    from dagster_pipes import DAGSTER_PIPES_CONTEXT_ENV_VAR, open_dagster_pipes

    return open_dagster_pipes() if DAGSTER_PIPES_CONTEXT_ENV_VAR in os.environ else nullcontext()


def _die_with_parent() -> None:
    """End this process when the run that started it is gone: kill -9 leaves no orphan."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(70)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _told_on_standard_input() -> tuple[str, Path] | None:
    """Import ahead, then return the stage and specification that a line names; None at the end.

    The line is resources/compute.py's; from then on all output goes to the log it names.
    """
    for name in IMPORTED_AHEAD:
        with suppress(ImportError):  # what is needed and missing is said where it is needed
            importlib.import_module(name)
    line = sys.stdin.readline()
    if not line:
        return None
    told = json.loads(line)
    os.environ.update(told["environment"])
    with Path(told["log"]).open("ab") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    return told["stage"], Path(told["specification"])


def main() -> None:
    """Run the stage named on the command line, or on standard input."""
    _die_with_parent()
    named: tuple[str, Path] | None
    named = _told_on_standard_input() if sys.argv[1] == AHEAD else (sys.argv[1], Path(sys.argv[2]))
    if named is not None:
        stage, spec_path = named
        run(stage, read_json(spec_path))


if __name__ == "__main__":
    main()
