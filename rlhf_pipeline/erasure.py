"""A person's data: everything that is held about them, shown or taken out, wherever it lies.

An erasure holds the claim of each of the person's agents, so that nothing is trained or snapshotted
meanwhile, and no answer's trace stays that it may have missed. It goes MLflow first, then files,
then the store in one transaction: while the store has their rows there is something left to do, and
an erasure that was killed, begun again, ends the same. What stays: counts, hashes, fingerprints,
ids that point to nothing, and model weights; the report names every version that learned from their
rows. What it does not reach: backups, exports, and whatever is kept outside the state folder but
for the store and MLflow.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
import structlog

from rlhf_pipeline import database as db
from rlhf_pipeline.config import Settings, models_named, own_settings
from rlhf_pipeline.errors import ClaimRefused, ConfigError, PipelineError, TrainingError
from rlhf_pipeline.evaluation import PAGE as COMPARISON
from rlhf_pipeline.evaluation.facts import DRIFT_PAGE, SUPPORT
from rlhf_pipeline.event_logs import Traces, forget_examples
from rlhf_pipeline.feedback import raters, snapshot
from rlhf_pipeline.feedback.claims import ERASURE, ClaimBook
from rlhf_pipeline.feedback.raters import Held, Person
from rlhf_pipeline.feedback.renaming import Renaming
from rlhf_pipeline.feedback.sources import AS_IT_IS
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.files import (
    alone_in,
    file_sha256,
    locked,
    printable,
    read_json,
    remove_half_written,
    write_json,
    write_text,
)
from rlhf_pipeline.records import hashed, now
from rlhf_pipeline.reward import RATERS, REPORT, WORST
from rlhf_pipeline.topics import names_any, without_topics

if TYPE_CHECKING:
    from rlhf_pipeline.registry.ledger import ModelVersion, PromotionLedger
    from rlhf_pipeline.registry.models import ModelRegistry

log = structlog.get_logger(__name__)


def held_about(registry: ModelRegistry, rater: str, agent_id: str | None = None) -> dict[str, Any]:
    """Return everything that is held about a person, as plain JSON values, by agent.

    `rater` is the id as it was sent, or the stored hash. Raises UnknownRater where there is
    nothing, and nothing was erased before.
    """
    from rlhf_pipeline.registry.forgetting import traces_of

    database = registry.ledger.database
    people = raters.find(database, rater, agent_id)
    before = raters.erasures_of(database, _meant(database, rater, agent_id))
    if not before:
        raters.need(people, agent_id)
    told = []
    for person in people:
        with database.read() as connection:
            held = raters.held(connection, person)
            contents = raters.contents(connection, person)
            unsigned = raters.unsigned_interactions(connection, person)
            rows = raters.rows_in_snapshots(connection, person.agent_id, held.votes)
        traces, said = traces_of(registry, person.agent_id, held.interactions, person.rater_id)
        told.append(
            {
                "agent_id": person.agent_id,
                "rater_id": person.rater_id,
                **contents,
                "unsigned_interactions": unsigned,
                "traces": [info.trace_id for info in traces],
                "assessments": [list(one) for one in said],
                "snapshots": _snapshots(rows),
                "versions": versions_with(registry.ledger, person.agent_id, rows),
            }
        )
    return {"agents": told, "erased_before": before, "as_of": now().isoformat()}


def erase(
    settings: Settings,
    registry: ModelRegistry,
    rater: str,
    agent_id: str | None = None,
    *,
    unsigned: bool = False,
) -> dict[str, Any]:
    """Take a person out of everything under the state folder; return what went and what learned.

    With `unsigned` also the interactions nobody signed that they said something about. What they
    say while it is at work stays, but for what is about what goes: asked again it takes out what
    has come in since. It returns every erasure of theirs, and under "tables" the dropped files that
    are for a person to look through. Raises UnknownRater where there never was anything,
    ClaimRefused while one of their agents is being trained or tuned, takes a dropped file in or has
    somebody erased, ConfigError where files wait in an agent's inbox and its own recipe does not
    load, RegistryError or OrchestratorAway while MLflow or Dagster's database is away; then ask
    again.
    """
    database = registry.ledger.database
    claims = ClaimBook(database)
    people = raters.find(database, rater, agent_id, unsigned=unsigned)
    meant = _meant(database, rater, agent_id)
    if not raters.erasures_of(database, meant):
        raters.need(people, agent_id)
    # Before anything goes: of an agent's recipe it may not be able to say what files are read by.
    names = {person: _own_names(settings, database, person.agent_id) for person in people}
    with ExitStack() as held:
        agents = sorted({person.agent_id for person in people})
        # Before the claims: who asks for an erasure that is under way would get, and let go, the
        # claim of that one, as whoever goes on with one that was killed has to get it.
        for agent in agents:
            _keep_ingestion_out(held, settings.inbox_lock(agent), agent)
        tokens = {}
        for person in people:
            mark = hashed("erasure", person.mark)
            claim = claims.claim(
                person.agent_id, mark, 0, holder=f"erasure-{mark[:16]}", asked_by=ERASURE
            )
            held.callback(claims.let_go, claim.token)
            held.enter_context(claims.kept_alive(claim.token))
            tokens[person] = claim.token
        for agent in agents:
            _keep_searches_out(held, settings.agent_folder(agent) / "tuning")
        for person, token in tokens.items():
            _take_out(settings, registry, person, token, names[person])
    database.overwrite_leavings()
    database.fold_back()
    if people:  # else nothing has come in since they were
        log.info("a person was erased", agents=[person.agent_id for person in people])
    tables = tables_beside(settings, registry, rater, agent_id)
    return {"erasures": raters.erasures_of(database, meant), "tables": tables}


def _own_names(settings: Settings, database: db.Database, agent_id: str) -> Renaming:
    """Return what an agent's files in the inbox are read by.

    Raises ConfigError where some wait and its recipe does not load: taken in once it does, they
    would bring back what was not found there.
    """
    from rlhf_pipeline.feedback.withdrawn import lines_in

    try:
        own = own_settings(settings, FeedbackStore(database).recipe_of(agent_id))
    except ConfigError:
        if lines_in(settings.inbox_folder(agent_id), taken=False):
            raise
        return AS_IT_IS
    return own.feedback.names.renaming()


def tables_beside(
    settings: Settings, registry: ModelRegistry, rater: str, agent_id: str | None = None
) -> list[str]:
    """Return the tables dropped for a person's agents, by their place in the state folder.

    And files under names that nothing takes in. Neither `held_about` nor `erase` looks into them:
    somebody has to, for rows of theirs.
    """
    from rlhf_pipeline.feedback.withdrawn import unread_in

    meant = _meant(registry.ledger.database, rater, agent_id)
    shown = Path(settings.feedback.drop_folder)
    return [
        printable(shown / agent / path.relative_to(inbox))
        for agent in sorted({person.agent_id for person in meant})
        for inbox in [settings.inbox_folder(agent)]
        for path in unread_in(inbox)
    ]


def _keep_searches_out(held: ExitStack, folder: Path) -> None:
    """Keep searches for settings, which hold no claim, from training on what is taken out."""
    if folder.is_dir():
        try:
            held.enter_context(alone_in(folder))
        except TrainingError as error:
            raise ClaimRefused(str(error)) from error


def _keep_ingestion_out(held: ExitStack, lock: Path, agent_id: str) -> None:
    """Keep dropped files from being taken in, and other erasures out.

    A file that is being read goes on as it was.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    if not locked(held.enter_context(lock.open("w"))):
        raise ClaimRefused(
            f"needed the inbox of agent {agent_id!r} to itself, found a file being taken in, or an "
            "erasure under way; ask again once that has ended"
        )


def versions_with(
    ledger: PromotionLedger, agent_id: str, rows: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the agent's versions that were trained from these snapshots, or from one of those."""
    versions = ledger.versions(agent_id)
    found: dict[int, dict[str, Any]] = {}
    for version in versions:  # in order, so what a version began from is known by then
        count = rows.get(version.fingerprint or "", 0)
        through = sorted(
            earlier.version
            for earlier in versions
            if earlier.version in found and _began_from(version, earlier)
        )
        if count or through:
            found[version.version] = {
                "version": version.version,
                "label": version.label,
                "rows": count,
                "through": through,
            }
    return list(found.values())


def _began_from(version: ModelVersion, earlier: ModelVersion) -> bool:
    from rlhf_pipeline.registry.comparison import by_place, version_at

    if earlier.version >= version.version:
        return False
    lineage = version.lineage
    places = [lineage[name] for name in ("started_from", "baseline") if lineage.get(name)]
    turns = [lineage["previous"]] if lineage.get("previous") else []
    # And turns whose models its recipe names: .../turns/TURN/reward, or a folder in there.
    named = [Path(place).parts for place in models_named(lineage.get("recipe", {})).values()]
    turns += [parts[parts.index("turns") + 1] for parts in named if "turns" in parts[:-1]]
    places += [Path(turn, "ppo", "policy") for turn in turns]
    known = by_place([earlier])
    return any(version_at(place, known) is not None for place in places)


def _meant(database: db.Database, rater: str, agent_id: str | None) -> list[Person]:
    a = db.agents.c.agent_id
    with database.read() as connection:
        known = connection.execute(sa.select(a)).scalars().all()
    agents = known if agent_id is None else [agent_id]  # as raters.find looks
    return [person for agent in agents for person in raters.persons(rater, agent)]


def _take_out(
    settings: Settings,
    registry: ModelRegistry,
    person: Person,
    token: int,
    renaming: Renaming,
) -> None:
    """Take out what is there now."""
    from rlhf_pipeline.registry.forgetting import forget_traces

    database, agent_id = registry.ledger.database, person.agent_id
    with database.read() as connection:
        held = raters.held(connection, person)
        rows = raters.rows_in_snapshots(connection, agent_id, (*held.votes, *held.about))
        events = sum(
            1
            for each in connection.execute(
                sa.select(db.chat_events.c.interaction_id).where(
                    db.chat_events.c.agent_id == agent_id,
                    db.chat_events.c.interaction_id.is_not(None),
                )
            ).scalars()
            if each in held.interactions
        )
    if not held:  # another erasure was before this one
        return
    counts = {
        "feedback": len(held.votes),
        "votes_about_them": len(held.about),
        "interactions": len(held.interactions),
        "chat_events": events,
        "quarantined": len(held.quarantined) + len(held.mentioned),
        **forget_traces(registry, agent_id, held.interactions, person.rater_id),
    }
    files = _clean_files(settings, registry, person, held, token, renaming)
    for fingerprint in rows:
        _note_hash(settings, database, agent_id, fingerprint)
    raters.remove(
        database,
        person,
        held,
        token,
        counts={**counts, "files": files},
        snapshots=_snapshots(rows),
        versions=versions_with(registry.ledger, agent_id, rows),
    )


def _snapshots(rows: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"fingerprint": fingerprint, "rows": count} for fingerprint, count in rows.items()]


def _clean_files(
    settings: Settings,
    registry: ModelRegistry,
    person: Person,
    held: Held,
    token: int,
    renaming: Renaming,
) -> int:
    """Take the person out of snapshots, data sets, turns, tuning and the inbox; count the files."""
    from rlhf_pipeline.feedback.withdrawn import (
        clean_folder,
        clean_inbox,
        clean_support,
        gone_topics,
        named_in,
        said_by,
    )
    from rlhf_pipeline.registry.forgetting import asked, forget_samples

    claims = ClaimBook(registry.ledger.database)
    agent = settings.agent_folder(person.agent_id)
    inbox = settings.inbox_folder(person.agent_id)
    # The claim means that nobody else writes there, and nothing below looks into what is left over.
    changed = remove_half_written(*(agent / name for name in ("snapshots", "turns", "tuning")))
    changed += clean_inbox(inbox, person, held.interactions, renaming)
    learned = {
        folder: said
        for folder in sorted((agent / "snapshots").glob("*/"))
        if (said := said_by(folder, held.gone)) is not None
    }
    # Before any snapshot is cleaned: they alone know what to look for.
    questions = asked(frozenset().union(*(said.prompts for said in learned.values())))
    ngrams = [named_in(folder / SUPPORT, said) for folder, said in learned.items()]
    topics = gone_topics(list(learned.values()))
    shown = Traces(questions, person.rater_id, frozenset().union(*ngrams), topics)
    if learned or held.votes:  # a snapshot that was pruned may have named them to Dagster
        changed += forget_examples(settings.state_dir / "dagster", person.agent_id, shown)
    if learned:
        changed += _clean_training(agent / "tuning", questions)
    if topics:
        changed += _clean_reports(agent, topics)
    for folder, said in learned.items():
        claims.check(token)
        first, prompts = agent / "turns" / folder.name, said.prompts
        for turn in {first, *first.parent.glob(f"{first.name}-*")}:  # asked for again: its own
            changed += _clean_training(turn, asked(prompts))
            changed += _clean_comparison(turn / "evaluation.json", prompts, topics)
            report = _report(turn)
            changed += forget_samples(
                registry, person.agent_id, folder.name, prompts, topics, report
            )
        changed += clean_support(folder / SUPPORT, said, person.voters, topics)
        min_rating = _settings_of(first, settings)["min_rating"]
        changed += clean_folder(folder, held.gone, min_rating=min_rating)
    for path in sorted(agent.rglob(RATERS)):
        changed += _without_rater(path, person.voters)
    for path in sorted(agent.rglob(WORST)):
        changed += _without_votes(path, held.gone)
    return changed


def _clean_training(folder: Path, questions: Collection[str]) -> int:
    """Take answers to these questions out of what PPO left; its checkpoints hold them as well."""
    from rlhf_pipeline.registry.forgetting import without_samples

    changed = 0
    for path in sorted(folder.rglob("result.json")):
        result = read_json(path)
        if not isinstance(result, dict) or "evaluations" not in result:
            continue
        cleaned = without_samples(result, questions)
        if cleaned != result:
            write_json(path, cleaned)
            changed += 1
    for path in sorted(folder.rglob("samples.jsonl")):
        with path.open(encoding="utf-8") as file:  # str.splitlines also cuts at U+2028, in a text
            lines = list(file)
        kept = [line for line in lines if json.loads(line)["prompt"] not in questions]
        if kept != lines:
            write_text(path, "".join(kept))
            changed += 1
    for path in sorted(folder.rglob("checkpoints")):
        if path.is_dir():  # of a run that ended or failed: none is under way
            shutil.rmtree(path)
            changed += 1
    return changed


def _clean_reports(agent: Path, topics: Collection[str]) -> int:
    """Blank these topics in what reward models are worth, and remove pages of drift that show one.

    The reports stand beside each model, and together in what their stage came to.
    """
    changed = 0
    for path in sorted({*agent.rglob(REPORT), *agent.rglob("reward.json")}):
        before = read_json(path)
        after = without_topics(before, topics)
        if after != before:
            write_json(path, after)
            changed += 1
    for page in sorted((agent / "snapshots").glob(f"*/{DRIFT_PAGE}")):
        if names_any(page.read_text(encoding="utf-8"), topics):
            page.unlink()
            changed += 1
    return changed


def _clean_comparison(path: Path, prompts: Collection[str], topics: Collection[str]) -> int:
    """Take these prompts' samples and topics out of a comparison, and write its words anew."""
    from rlhf_pipeline.evaluation.report import EvaluationReport

    if not path.exists():
        return 0
    kept = read_json(path)
    before = kept["result"]["report"]
    gone = [json.loads(text) for text in prompts]
    samples = [sample for sample in before["samples"] if sample["prompt"] not in gone]
    report = {**without_topics(before, topics), "samples": samples}
    if report == before:
        return 0
    markdown = EvaluationReport.from_json(report).to_markdown()
    result = {**kept["result"], "report": report, "markdown": markdown}
    (path.parent / COMPARISON).unlink(missing_ok=True)
    write_json(path, {**kept, "result": result})
    return 1


def _report(turn: Path) -> str | None:
    path = turn / "evaluation.json"
    return str(read_json(path)["result"]["markdown"]) if path.exists() else None


def _settings_of(turn: Path, today: Settings) -> Mapping[str, Any]:
    """Return the feedback settings a turn's data sets were made with; today's if none is known."""
    for path in sorted(turn.glob("*.spec.json")):
        with suppress(PipelineError, KeyError):
            told: Mapping[str, Any] = read_json(path)["settings"]["feedback"]
            return told
    return today.feedback.model_dump()


def _without_rater(path: Path, voters: Collection[str]) -> int:
    before = read_json(path)
    after = {
        table: {name: one for name, one in people.items() if name not in voters}
        for table, people in before.items()  # "careful" or "weights"
    }
    if after == before:
        return 0
    write_json(path, after)
    return 1


def _without_votes(path: Path, gone: Collection[str]) -> int:
    """Take these votes, and pairs they made, out of what a reward model is most wrong about."""
    before = read_json(path)
    after = {
        of: [row for row in rows if row.get("pair_id", row.get("example_id")) not in gone]
        for of, rows in before.items()
    }
    if after == before:
        return 0
    write_json(path, after)
    return 1


def _note_hash(settings: Settings, database: db.Database, agent_id: str, fingerprint: str) -> None:
    """Keep the hash of a snapshot's file as it is now; its fingerprint and count stay."""
    folder = settings.agent_folder(agent_id) / "snapshots" / fingerprint[:16]
    path, s = folder / snapshot.FILE, db.snapshots
    if path.exists():
        sha256 = file_sha256(path)
        with database.write() as connection:
            connection.execute(
                s.update()
                .where(s.c.agent_id == agent_id, s.c.fingerprint == fingerprint)
                .values(sha256=sha256)
            )


def told(erasures: Sequence[Mapping[str, Any]], tables: Sequence[str] = ()) -> list[str]:
    """Return erasures, and the tables that nobody looked into, as lines for a person."""
    lines = []
    for one in erasures:
        counts = ", ".join(f"{name} {n}" for name, n in one["counts"].items() if n)
        lines.append(f"agent {one['agent_id']}, {one['erased_at'][:19]} UTC: {counts or 'nothing'}")
        for taken in one["snapshots"]:
            lines.append(f"  snapshot {taken['fingerprint'][:16]}: {taken['rows']} rows")
        for version in one["versions"]:
            through = ", ".join(str(number) for number in version["through"])
            began = f", and began from version {through}" if through else ""
            lines.append(
                f"  version {version['version']} ({version['label']}) is of a snapshot with "
                f"{version['rows']} rows of theirs{began}"
            )
    named = [f"not looked into: {t}; take their rows out of it, or delete it" for t in tables]
    return lines + named
