"""What may go, by age and number, and never anything the ledger points at.

Eight kinds of things pile up. Of each the newest stay, however old, and the young, however many:
  checkpoints  of turns that came to their verdict: nothing resumes from them
  rewards      weights of the reward models of versions that never were champion, that no version
               began from and no recipe names, of today or of a version; reports stay
  turns        that came to no version: snapshot, data sets, folders, MLflow runs
  traces       of chats in MLflow
  chats, looks, events, quarantine: rows of the store (old_rows.py says which)
What always stays: every registered version's own files, run, snapshot and data sets (`rlhf
reproduce` trains from them), whatever a champion, the challenger or a running experiment is made
of, the last turn with a verdict, and everything of an agent that is being trained: its claim is
held here while something goes. A folder is renamed before it is removed, so a prune that was killed
has removed a thing or has not, and the next one ends the same. Dagster's own runs are
automation/old_runs.py's. What this does not reach: backups, and rows of deleted runs in MLflow's
database (`mlflow gc`).
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import structlog

from rlhf_pipeline import old_rows
from rlhf_pipeline.config import RECIPES, KeptSettings, Settings, models_named
from rlhf_pipeline.errors import ClaimRefused, ConfigError, PipelineError
from rlhf_pipeline.evaluation.facts import SUPPORT
from rlhf_pipeline.event_logs import Traces, forget_examples
from rlhf_pipeline.experiment.book import ExperimentBook
from rlhf_pipeline.feedback import snapshot
from rlhf_pipeline.feedback.claims import NO_TRAINING, PRUNE, Claim, ClaimBook
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.files import beside, read_json
from rlhf_pipeline.old_rows import RowKind
from rlhf_pipeline.records import Progress, hashed, ignore_progress, now
from rlhf_pipeline.registry.ledger import ModelVersion, PromotionLedger

if TYPE_CHECKING:
    from rlhf_pipeline.registry.models import ModelRegistry

log = structlog.get_logger(__name__)
DAMAGE = (PipelineError, OSError, ValueError)  # what reading a damaged snapshot raises

Kind = Literal["checkpoints", "rewards", "turns", "traces", "runs"] | RowKind
CHECKPOINTS = Path("ppo") / "checkpoints"  # in a turn's folder
WEIGHTS = "reward/*/trunk"  # of the reward models, likewise
MARK = 16  # digits of a fingerprint that name its folders


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that may go."""

    kind: Kind
    agent_id: str
    name: str
    made_at: datetime
    stays: str | None = None  # why; None: it goes
    places: tuple[Path, ...] = ()  # folders
    runs: tuple[str, ...] = ()  # MLflow's ids
    traces: int = 0  # how many of MLflow's
    rows: int = 0  # how many of the store
    bytes: int = 0  # in the folders


def lost_recipes(
    agents: Iterable[str], settings_of: Callable[[str], Settings]
) -> dict[str, ConfigError]:
    """Return why, for each of the agents whose recipe does not load: what of it may go nobody says.

    They are left out of `prune`, and told at its end with `told_lost`.
    """
    lost = {}
    for agent_id in agents:
        try:
            settings_of(agent_id)
        except ConfigError as error:
            lost[agent_id] = error
    return lost


def told_lost(lost: Mapping[str, ConfigError]) -> str:
    """Return for a person which recipes do not load."""
    found = "; ".join(f"{agent_id}: {error}" for agent_id, error in lost.items())
    return f"needed every agent's recipe to load, found {found}; correct it"


def prune(
    registry: ModelRegistry,
    settings_of: Callable[[str], Settings],
    *,
    agents: Sequence[str] | None = None,
    dry_run: bool = False,
    at: datetime | None = None,
    report: Progress = ignore_progress,
) -> list[Item]:
    """Remove what may go of these agents (None: every one), and return all that was looked at.

    With `dry_run` nothing is removed. An agent that is being trained is left as it is, and so it
    says. Raises RegistryError or OrchestratorAway while MLflow or Dagster's database cannot be
    reached; what went by then has gone, and the next prune goes on.
    """
    at = at or now()
    claims = ClaimBook(registry.ledger.database)
    looked: list[Item] = []
    every = FeedbackStore(registry.ledger.database).agents()
    named = _named(registry.ledger, every, settings_of)
    for agent_id in every if agents is None else agents:
        settings = settings_of(agent_id)
        if dry_run:
            looked += survey(registry, settings, agent_id, named, at=at)
            continue
        mark, holder = hashed(PRUNE, agent_id), f"prune-{uuid.uuid4().hex[:12]}"
        try:
            held = claims.claim(agent_id, mark, 0, holder=holder, asked_by=PRUNE)
        except ClaimRefused:
            looked += survey(registry, settings, agent_id, named, at=at)  # says who trains it
            continue
        try:
            with claims.kept_alive(held.token):
                looked += _prune_agent(registry, settings, held, named, at, report)
        finally:
            claims.let_go(held.token)
    return looked


def _prune_agent(
    registry: ModelRegistry,
    settings: Settings,
    held: Claim,
    named: Mapping[Path, str],
    at: datetime,
    report: Progress,
) -> list[Item]:
    from rlhf_pipeline.registry.forgetting import forget_old_traces, forget_runs

    agent_id = held.agent_id
    claims, folder = ClaimBook(registry.ledger.database), settings.agent_folder(agent_id)
    for leftover in [*folder.glob("snapshots/.*.old-*"), *folder.glob("turns/**/.*.old-*")]:
        shutil.rmtree(leftover, ignore_errors=True)  # of a prune that was killed
    items = survey(registry, settings, agent_id, named, at=at, ours=held.token)
    for n, item in enumerate(items):
        if item.stays is not None:
            continue
        claims.check(held.token)
        if why := _used_since(registry, settings, item, held.token):
            items[n] = replace(item, stays=why)
            continue
        taken = [place for place in item.places if place.parent.name == "snapshots"]
        try:
            shown = [_said_alone(place) for place in taken]
        except PipelineError as error:
            items[n] = replace(item, stays=str(error))
            continue
        for said in shown:
            if said is not None:
                forget_examples(settings.state_dir / "dagster", agent_id, said)
        if item.kind == "traces":
            forget_old_traces(registry, agent_id, *_traces_that_go(settings, at))
        if item.kind in old_rows.KINDS:
            old_rows.remove(
                registry.ledger.database,
                item.kind,
                agent_id,
                item.made_at,
                _traced(registry, settings, item, at),
                lambda: claims.check(held.token),
            )
        forget_runs(registry, item.runs)
        for place in item.places:
            _remove(place)
        report({"agent": agent_id, "kind": item.kind, "removed": item.name})
        log.info("pruned", agent=agent_id, kind=item.kind, name=item.name, bytes=item.bytes)
    return items


def _used_since(registry: ModelRegistry, settings: Settings, item: Item, ours: int) -> str | None:
    """Return what uses reward weights by now, as promotions and experiments wait for no prune."""
    if item.kind != "rewards":
        return None
    agent_id, ledger = item.agent_id, registry.ledger
    standing = standing_of(ledger, ClaimBook(ledger.database), agent_id, ours)
    turns = _turns(settings.agent_folder(agent_id), standing)
    found = _rewards(agent_id, [t for t in turns if t.folder.name == item.name], standing)
    return next((again.stays for again in found), None)


def survey(
    registry: ModelRegistry,
    settings: Settings,
    agent_id: str,
    named: Mapping[Path, str],
    *,
    at: datetime,
    ours: int | None = None,
) -> list[Item]:
    """Return everything of an agent that may go, with why it stays if it does; newest first.

    `named` are folders of reward models that stay, and why. `ours` is the token of the claim under
    which this looks.
    """
    from rlhf_pipeline.registry.forgetting import old_traces

    claims, rules = ClaimBook(registry.ledger.database), settings.retention
    standing = standing_of(registry.ledger, claims, agent_id, ours)
    turns = _turns(settings.agent_folder(agent_id), standing)
    found = [
        *aged(_checkpoints(agent_id, turns), rules.checkpoints, at),
        *aged(_rewards(agent_id, turns, standing), rules.rewards, at),
        *aged(_unregistered(registry, settings, agent_id, turns, standing), rules.turns, at),
    ]
    newest, before = _traces_that_go(settings, at)
    if count := len(old_traces(registry, agent_id, newest, before)):
        found.append(Item("traces", agent_id, f"before {before:%Y-%m-%d}", before, traces=count))
    found += _old_rows(registry, settings, agent_id, at)
    if standing.at_work is not None:
        found = [replace(item, stays=standing.at_work) for item in found]
    return [_needed(item, named) for item in found]


def _named(
    ledger: PromotionLedger, agents: Iterable[str], settings_of: Callable[[str], Settings]
) -> dict[Path, str]:
    """Return where models lie that recipes name, or may name, each with why they stay.

    The recipes of today, and those that any agent's versions were trained by.
    """
    from rlhf_pipeline.registry.reproduce import moved

    found: dict[Path, str] = {}
    for agent_id in agents:
        try:
            settings = settings_of(agent_id)
        except ConfigError:
            anywhere = Path("/")
            found[anywhere] = f"the recipe of {agent_id} does not load, and may name them"
            continue
        for name, place in models_named(settings.model_dump(mode="json")).items():
            folder = (RECIPES.parent / place).resolve()
            found.setdefault(folder, f"the recipe of {agent_id} names them ({name})")
        for version in ledger.versions(agent_id):
            recipe = version.lineage.get("recipe", {})
            for name, place in models_named(recipe).items():
                folder = moved(place, str(recipe["state_dir"]), settings)
                folder = (RECIPES.parent / folder).resolve()
                why = f"version {version.version} of {agent_id} was trained by them ({name})"
                found.setdefault(folder, why)
    return found


def _needed(item: Item, named: Mapping[Path, str]) -> Item:
    """Return the item, which stays where reward models in it are named."""
    for place in map(Path.resolve, item.places):
        for folder, why in named.items():
            of_it = item.kind == "rewards" and place.is_relative_to(folder)
            if item.stays is None and (of_it or folder.is_relative_to(place)):
                return replace(item, stays=why)
    return item


@dataclass(frozen=True, slots=True)
class AgentStanding:
    """What the ledger, the claims and the experiments say of an agent."""

    versions: tuple[ModelVersion, ...]
    in_use: dict[int, str]  # version -> what it is
    history: tuple[Claim, ...]
    last_done: str | None  # the mark of the last turn with a verdict
    at_work: str | None  # who else holds the agent now, and for what


@dataclass(frozen=True, slots=True)
class _Turn:
    """One folder that a turn trained in."""

    folder: Path
    mark: str
    made_at: datetime
    has_verdict: bool


def standing_of(
    ledger: PromotionLedger, claims: ClaimBook, agent_id: str, ours: int | None
) -> AgentStanding:
    """Return what of an agent is in use; `ours` is the token of the claim under which one looks."""
    versions, standing = ledger.versions(agent_id), ledger.standing(agent_id)
    held, done = claims.held(agent_id), claims.last_done(agent_id)
    running = ExperimentBook(ledger.database).running(agent_id)
    in_use: dict[int, str] = {}
    if versions:
        in_use[versions[-1].version] = "is the newest version"
    if standing.challenger is not None:
        in_use[standing.challenger.version] = "is the challenger"
    for entry in standing.history:  # whoever was champion may be rolled back to
        in_use[entry.version] = "was champion"
    if standing.champion is not None:
        in_use[standing.champion.version] = "is the champion"
    if running is not None:
        for version in (running.champion, running.challenger):
            in_use[version] = "is in a running experiment"
    stranger = held if held is not None and held.token != ours else None
    return AgentStanding(
        versions=tuple(versions),
        in_use=in_use,
        history=tuple(claims.history(agent_id)),
        last_done=done.fingerprint[:MARK] if done else None,
        at_work=_at_work(stranger) if stranger is not None else None,
    )


def _at_work(claim: Claim) -> str:
    if claim.asked_by in NO_TRAINING:
        return f"the agent is being {NO_TRAINING[claim.asked_by]}"
    return f"run {claim.holder[:20]} trains it"


def _turns(folder: Path, standing: AgentStanding) -> list[_Turn]:
    found = []
    for path in sorted((folder / "turns").glob("[!.]*/")):
        mark, _, number = path.name.partition("-")
        verdicts = sum(
            1 for c in standing.history if c.fingerprint[:MARK] == mark and c.state == "done"
        )
        has_verdict = verdicts >= (int(number) if number.isdigit() else 1)
        found.append(_Turn(path, mark, _made_at(path, mark, standing), has_verdict))
    return found


def _made_at(path: Path, mark: str, standing: AgentStanding) -> datetime:
    """Return when somebody was last at work on it: the claim's last heartbeat, else the file's."""
    beats = [c.heartbeat_at for c in standing.history if c.fingerprint[:MARK] == mark]
    if beats:
        return max(beats)
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except FileNotFoundError:  # somebody is at work there
        return now()


def _checkpoints(agent_id: str, turns: Sequence[_Turn]) -> list[Item]:
    return [
        _item("checkpoints", agent_id, turn, [turn.folder / CHECKPOINTS], None)
        for turn in turns
        if turn.has_verdict and (turn.folder / CHECKPOINTS).is_dir()
    ]


def _rewards(agent_id: str, turns: Sequence[_Turn], standing: AgentStanding) -> list[Item]:
    found = []
    # By name: the state folder may have been moved since, and an agent's turns are in one folder.
    begun = {
        Path(v.lineage["previous"]).name: f"version {v.version} began from them"
        for v in standing.versions
        if v.lineage.get("previous")
    }
    for turn in turns:
        policy = turn.folder.resolve() / "ppo" / "policy"
        made = [v for v in standing.versions if v.path == policy]
        weights = sorted(turn.folder.glob(WEIGHTS))
        if not made or not weights:
            continue
        used = [
            f"version {v.version} {standing.in_use[v.version]}"
            for v in made
            if v.version in standing.in_use
        ]
        if turn.mark == standing.last_done:
            used.append("the last turn with a verdict")
        if turn.folder.name in begun:
            used.append(begun[turn.folder.name])
        found.append(_item("rewards", agent_id, turn, weights, used[0] if used else None))
    return found


def _unregistered(
    registry: ModelRegistry,
    settings: Settings,
    agent_id: str,
    turns: Sequence[_Turn],
    standing: AgentStanding,
) -> list[Item]:
    """Return the turns that came to no version, snapshot, folders and runs of each together."""
    from rlhf_pipeline.registry.forgetting import runs_of

    folder = settings.agent_folder(agent_id)
    taken = {path.name: path for path in sorted((folder / "snapshots").glob("[!.]*/"))}
    registered = {v.fingerprint[:MARK] for v in standing.versions if v.fingerprint}
    homes = {parent for v in standing.versions for parent in v.path.resolve().parents}
    known = {v.mlflow_run_id for v in standing.versions}
    found = []
    for mark in sorted({*taken, *(turn.mark for turn in turns)}):
        folders = [turn.folder for turn in turns if turn.mark == mark]
        if mark in registered or any(path.resolve() in homes for path in folders):
            continue
        # The snapshot last: it alone tells what to look for in what quotes it.
        places = [*folders, *([taken[mark]] if mark in taken else [])]
        turn = _Turn(places[0], mark, _made_at(places[0], mark, standing), has_verdict=False)
        last = "the last turn with a verdict" if mark == standing.last_done else None
        runs = [run for run in runs_of(registry, agent_id, mark) if run not in known]
        found.append(replace(_item("turns", agent_id, turn, places, last), runs=tuple(runs)))
    return found


def _item(
    kind: Kind, agent_id: str, turn: _Turn, places: Sequence[Path], stays: str | None
) -> Item:
    size = sum(map(_size_of, places))
    linked = [place for place in places if place.is_symlink()]
    if linked and stays is None:
        stays = f"{linked[0]} is a link: remove it and what it leads to by hand"
    name = turn.mark if kind == "turns" else turn.folder.name
    return Item(kind, agent_id, name, turn.made_at, stays, tuple(places), bytes=size)


def _size_of(folder: Path) -> int:
    """Return how many bytes a folder's files have; none for what goes while they are listed."""
    size = 0
    # A training that is under way removes folders: os.walk passes over one, where rglob raises.
    for place, _, files in os.walk(folder):
        for name in files:
            with suppress(FileNotFoundError):
                size += Path(place, name).stat().st_size
    return size


def aged(items: Iterable[Item], kept: KeptSettings, at: datetime) -> list[Item]:
    """Return the items, newest first, with those that are new or young told to stay."""
    found = []
    for place, item in enumerate(sorted(items, key=lambda i: (i.made_at, i.name), reverse=True)):
        if item.stays is not None:
            found.append(item)
        elif place < kept.newest:
            found.append(replace(item, stays=f"among the newest {kept.newest}"))
        elif at - item.made_at < timedelta(days=kept.days):
            found.append(replace(item, stays=f"younger than {kept.days:g} days"))
        else:
            found.append(item)
    return found


def _traces_that_go(settings: Settings, at: datetime) -> tuple[int, datetime]:
    """Return how many of the newest traces stay, and before when the others go."""
    kept = settings.retention.traces
    return kept.newest, at - timedelta(days=kept.days)


def _old_rows(
    registry: ModelRegistry, settings: Settings, agent_id: str, at: datetime
) -> list[Item]:
    """Return the agent's rows in the store that may go, those of a kind together."""
    database, found = registry.ledger.database, []
    for kind in old_rows.KINDS:
        kept: KeptSettings = getattr(settings.retention, kind)
        before = old_rows.bound(database, kind, agent_id, kept, at)
        if before is None:
            continue
        item = Item(kind, agent_id, f"before {before:%Y-%m-%d}", before)
        without = _traced(registry, settings, item, at)
        if rows := old_rows.count(database, kind, agent_id, before, without):
            found.append(replace(item, rows=rows))
    return found


def _traced(
    registry: ModelRegistry, settings: Settings, item: Item, at: datetime
) -> frozenset[str]:
    """Return the chats that stay for a trace of theirs in MLflow stays."""
    from rlhf_pipeline.registry.forgetting import traced

    if item.kind != "chats":
        return frozenset()
    return traced(registry, item.agent_id, *_traces_that_go(settings, at), item.made_at)


def _said_alone(taken: Path) -> Traces | None:
    """Return what Dagster's pages may quote of a snapshot and of no other of the agent: to blank.

    Whoever is erased later is looked for by what the snapshots say of them; this one will not be
    there to say it. Raises PipelineError where it is damaged.
    """
    from rlhf_pipeline.registry.forgetting import asked

    others = [place for place in taken.parent.glob("[!.]*/") if place != taken]
    # The newest first: mostly it says all of it again, and the hundreds before it need not be read.
    others.sort(key=lambda place: place.stat().st_mtime, reverse=True)
    try:
        prompts, ngrams = _prompts_of(taken), _ngrams_of(taken)
    except DAMAGE as error:
        raise PipelineError(f"its snapshot is damaged, look at it: {error}") from error
    for other in others:  # one at a time: difference(*...) would hold what all of them say
        try:
            prompts = prompts and prompts - _prompts_of(other)
            ngrams = ngrams and ngrams - _ngrams_of(other)
        except DAMAGE as error:  # it says nothing any more, and keeps nothing from going
            log.warning("snapshot damaged", path=str(other), error=str(error))
    try:
        return Traces(asked(prompts), ngrams=ngrams) if prompts or ngrams else None
    except DAMAGE as error:  # a prompt among them is none
        raise PipelineError(f"its snapshot is damaged, look at it: {error}") from error


def _prompts_of(taken: Path) -> frozenset[str]:
    """Return the prompts of a snapshot, as JSON."""
    import pyarrow.parquet as pq

    path = taken / snapshot.FILE
    found: set[str] = set()
    if path.exists():
        with pq.ParquetFile(path) as source:
            for batch in source.iter_batches(columns=list(snapshot.PROMPTS)):
                for row in batch.to_pylist():
                    found.update(text for text in row.values() if text)
    return frozenset(found)


def _ngrams_of(taken: Path) -> frozenset[str]:
    path = taken / SUPPORT
    told = read_json(path)["associations"] if path.exists() else []
    return frozenset(association["ngram"] for association in told)


def _remove(place: Path) -> None:
    """Take a folder away in one rename, then remove what it was."""
    if place.exists():
        aside = beside(place, "old")
        place.rename(aside)
        shutil.rmtree(aside)
