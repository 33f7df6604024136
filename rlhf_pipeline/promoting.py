"""What becomes of a turn's version: refused, for a person to decide, on trial, or the champion.

The gate has judged it by then, and the ledger holds its verdict. Everything here may be asked
again by an attempt that follows one that died: it finds what that came to, and changes nothing.
"""

from __future__ import annotations

from rlhf_pipeline.config import Settings
from rlhf_pipeline.database import Database
from rlhf_pipeline.errors import RegistryError
from rlhf_pipeline.experiment.assignment import percent
from rlhf_pipeline.experiment.book import Experiment, ExperimentBook
from rlhf_pipeline.feedback.claims import ClaimBook
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.registry.ledger import ModelVersion, Promotion, PromotionLedger
from rlhf_pipeline.stages import Turn


def promote_if_due(turn: Turn, began: ModelVersion | None, ledger: PromotionLedger) -> str:
    """Promote the turn's version if the gate passed and nobody has to be asked; say which.

    `began` is the champion that the turn started from. Where people are to meet the version first,
    their experiment begins instead. Raises RegistryError where the turn has no version yet.
    """
    versions = [v for v in ledger.versions(turn.agent_id) if v.fingerprint == turn.fingerprint]
    champion = ledger.champion(turn.agent_id)
    if champion is None or not versions:
        raise RegistryError(
            f"promoting needs a champion and a version of this turn, found {len(versions)} "
            f"versions and {'a' if champion else 'no'} champion of agent {turn.agent_id}; "
            "materialise registered_model first"
        )
    version = versions[-1]
    if (ours := _promotion_of(turn, ledger)) is not None:
        return (
            f"champion moved from {ours.previous_version} to {ours.version}, by an attempt that "
            "ended before it could say so"
        )
    if champion.version == version.version:
        return f"version {version.version} is the champion"
    if (why := _why_not(turn, version, ledger)) is not None:
        return f"version {version.version} {why}; version {champion.version} stays"
    if (why := _why_ask(turn, version, champion, began, ledger.database)) is not None:
        return f"version {version.version} passed{why}, so a person decides"
    if not promotes_by_itself(FeedbackStore(ledger.database), turn.agent_id, turn.settings):
        return (
            f"version {version.version} passed and waits for a person: "
            f"{_by_hand(version)}, or the service's /candidates/{turn.agent_id}"
        )
    if (words := _before_people(turn, version, champion, ledger.database)) is not None:
        return f"version {version.version} passed{words}"
    return ledger.promote(
        turn.agent_id,
        version.version,
        actor="promotion",
        reason="the gate passed and promotion is automatic for this agent",
        expected_champion=champion.version,
        token=turn.token,
    ).words


def promotes_by_itself(store: FeedbackStore, agent_id: str, settings: Settings) -> bool:
    """Say whether no person is asked: as was chosen for the agent, else as the settings say."""
    row = store.agent(agent_id)
    chosen = None if row is None else row.automatic_promotion
    return settings.promotion.automatic if chosen is None else bool(chosen)


def _promotion_of(turn: Turn, ledger: PromotionLedger) -> Promotion | None:
    """Return the promotion this turn came to in an attempt that died before it closed."""
    claims = ClaimBook(ledger.database)
    claim = claims.held(turn.agent_id)
    if claim is None:
        return None
    tokens = {attempt.token for attempt in claims.attempts(claim)}
    made = [p for p in ledger.history(turn.agent_id) if p.token in tokens]
    return next((p for p in reversed(made) if p.action == "promote"), None)


def _why_not(turn: Turn, version: ModelVersion, ledger: PromotionLedger) -> str | None:
    """Return why the version is none to promote; None where nothing is against it."""
    if not version.passed_gate:
        return "was refused"
    # The same votes, trained on again, may come to the files of an earlier version.
    why = ledger.standing(turn.agent_id).withdrawn.get(version.version)
    return None if why is None else f"passed, but {why}"


def _why_ask(
    turn: Turn,
    version: ModelVersion,
    champion: ModelVersion,
    began: ModelVersion | None,
    database: Database,
) -> str | None:
    """Return why a person decides even where promotion is automatic; None where nothing says so.

    The verdict is of another champion, of days when the traffic drifted, or of votes that are gone.
    """
    if began is not None and began.version != champion.version:
        return (
            f" against version {began.version}, but version {champion.version} is the champion now"
        )
    gate = version.gate or {}
    if pauses := [r["words"] for r in gate["results"] if r["verdict"] == "pause"]:
        return f"; {'; '.join(pauses)}"
    if FeedbackStore(database).withdrawn_from(turn.agent_id, turn.watermark):
        # The votes that it was judged by may be among them.
        return ", but votes that it learned from were taken back since"
    return None


def _before_people(
    turn: Turn, version: ModelVersion, champion: ModelVersion, database: Database
) -> str | None:
    """Return what its experiment comes to, begun here where it is due.

    None where people meet the version as the champion at once.
    """
    book = ExperimentBook(database)
    if running := book.running(turn.agent_id):  # a person may have begun one where none is due
        if running.challenger == version.version:  # an earlier attempt began it
            return _meets(running)
        return f"; version {running.challenger} is in an experiment, so this one waits for a person"
    if not turn.settings.experiments.enabled:
        return None
    if turn.agent_id in turn.settings.serving.upstreams:
        return (
            ", and an experiment would reach nobody, as an upstream answers this agent's people, "
            f"so a person decides: {_by_hand(version)}"
        )
    met = [e for e in book.history(turn.agent_id) if e.challenger == version.version]
    if met:  # begun by an attempt that died before it could say so
        return (
            f" and has met people; that {met[0].state.replace('_', ' ')}: {met[0].reason}; "
            "a person decides"
        )
    begun = book.start(
        turn.agent_id,
        champion=champion.version,
        challenger=version.version,
        share=turn.settings.experiments.ramp[0],
        actor="promotion",
    )
    return _meets(begun)


def _meets(experiment: Experiment) -> str:
    return f" and meets {percent(experiment.share)} of the people"


def _by_hand(version: ModelVersion) -> str:
    return f"rlhf promote {version.version} --agent {version.agent_id}"
