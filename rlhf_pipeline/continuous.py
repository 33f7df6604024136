"""When the next turn starts by itself: enough new votes, old enough, cool enough, within budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import get_args

from rlhf_pipeline.config import PAIRS_ALONE, RewardSettings, Settings, Trains
from rlhf_pipeline.database import Database
from rlhf_pipeline.experiment.book import ExperimentBook
from rlhf_pipeline.feedback.claims import AHEAD, INTERRUPTED, Claim, ClaimBook
from rlhf_pipeline.feedback.datasets import JOBS, job_of
from rlhf_pipeline.feedback.raters import erased_since
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.files import read_json
from rlhf_pipeline.registry.ledger import PromotionLedger
from rlhf_pipeline.reward import FEWEST_JUDGED, FEWEST_MATCHED
from rlhf_pipeline.stages import BEGAN, REWARD

TEACHING = get_args(Trains)  # kinds of votes
FEW_VOTERS = 200  # of more than these each model gets some
JUDGING = (
    f"{FEWEST_JUDGED} preferences or corrections, or {FEWEST_MATCHED} answers that most liked and "
    "as many that most did not, on held-out prompts"
)
BACK_OFF = timedelta(minutes=5)  # after the first failed attempt; doubles with each
LONGEST_BACK_OFF = timedelta(hours=6)
COUNTED = 1000  # new votes, beyond what is needed: so many are told as "at least"
PATIENCE = 10  # times the quiet time: enough votes that have waited so long go without it


@dataclass(frozen=True, slots=True)
class Due:
    """A turn that should start now."""

    agent_id: str
    watermark: int
    votes: int  # new since the last turn; where they are more than needed, COUNTED at most
    attempt: int  # at this watermark

    @property
    def run_key(self) -> str:
        """Return what makes two requests the same request.

        The votes up to a watermark are the same votes, and have one fingerprint; that one takes
        reading all of them, which the run itself does.
        """
        return f"{self.agent_id}:{self.watermark}:{self.attempt}"


@dataclass(frozen=True, slots=True)
class NotDue:
    """Why no turn starts, with the numbers."""

    agent_id: str
    reason: str


def due(
    database: Database,
    agent_id: str,
    settings: Settings,
    *,
    at: datetime,
    min_new_feedback: int | None = None,
) -> Due | NotDue:
    """Return whether the agent's next turn starts at this moment, or why not.

    `min_new_feedback` stands in for the setting (the nightly schedule takes 1). What it costs grows
    neither with what is there nor with what is new: a sensor asks every few seconds.
    """
    rules = settings.continuous_learning
    store, claims = FeedbackStore(database), ClaimBook(database)
    row = store.agent(agent_id)
    if row is not None and row.paused_reason is not None:
        return NotDue(agent_id, f"paused: {row.paused_reason}")
    if not (settings.training.enabled and rules.enabled):
        return NotDue(agent_id, "training.enabled or continuous_learning.enabled is off")
    held = claims.held(agent_id)
    if held is not None:
        return NotDue(
            agent_id, f"run {held.holder[:8]} holds attempt {held.attempt} (token {held.token})"
        )
    if (running := ExperimentBook(database).running(agent_id)) is not None:
        # A turn now would begin from a champion that may be replaced before it ends, and its
        # version could meet nobody while this one does.
        return NotDue(agent_id, f"version {running.challenger} is in an experiment")
    last = claims.last_done(agent_id)
    watermark = last.watermark if last else 0
    needed = min_new_feedback or rules.min_new_feedback
    most = max(needed, COUNTED)
    new = store.new_since(agent_id, watermark, most=most)
    if new.votes < needed or new.newest_received_at is None:
        return NotDue(agent_id, f"{new.votes} new votes of the {needed} needed")
    age, quiet = at - new.newest_received_at, timedelta(seconds=rules.min_age_seconds)
    if is_young(age, quiet):
        # An assistant that people use around the clock is never quiet.
        until = at - PATIENCE * quiet
        new = store.new_since(agent_id, watermark, until=until, most=most)
        if new.votes < needed:
            return NotDue(
                agent_id,
                f"newest vote is {age.total_seconds():.0f} s old, {rules.min_age_seconds:g} s "
                f"needed, or {needed} votes that have waited {PATIENCE * rules.min_age_seconds:g} "
                f"s: {new.votes} have",
            )
    history = claims.history(agent_id)
    if last is not None and last.watermark > 0:  # version 0 from seeds needs no rest
        rested = at - last.heartbeat_at
        if is_young(rested, timedelta(minutes=rules.cool_down_minutes)):
            return NotDue(
                agent_id,
                f"{rested / timedelta(minutes=1):.1f} min since the last turn, "
                f"{rules.cool_down_minutes:g} needed",
            )
    deadline = timedelta(minutes=rules.deadline_minutes)
    spent = minutes_in_a_day(history, at, longest=deadline)
    if spent >= rules.gpu_minutes_per_night:
        return NotDue(
            agent_id,
            f"{spent:.0f} min of training in 24 h, budget {rules.gpu_minutes_per_night} min",
        )
    # Whatever they trained on: with each new vote there is another watermark to fail at.
    if failed := failed_since_verdict(history):
        latest, wait = failed[-1], back_off(len(failed))
        # One that died may be found long after; who finds it asks for it again at once.
        ended = latest.expires_at if latest.state == "lost" else latest.heartbeat_at
        waited = at - ended
        if is_young(waited, wait):
            return NotDue(
                agent_id,
                f"{waited / timedelta(minutes=1):.1f} min since a turn failed ({len(failed)} since "
                f"the last verdict), {wait / timedelta(minutes=1):g} needed",
            )
    if (begun := unfinished(database, history, settings)) is not None:
        attempt = len(attempts_at(begun.watermark, history)) + 1
        return Due(agent_id, begun.watermark, new.votes, attempt)
    earlier = attempts_at(new.newest_seq, history)
    if len(earlier) >= rules.max_attempts:
        mark = earlier[-1].fingerprint[:16]
        return NotDue(agent_id, f"{len(earlier)} attempts at {mark} failed; a person must look")
    return Due(agent_id, new.newest_seq, new.votes, len(earlier) + 1)


def is_young(age: timedelta, needed: timedelta) -> bool:
    """Say whether an age is below what is needed; what a clock far ahead dated is not young."""
    return -AHEAD <= age < needed


def lacks_for_reward(
    store: FeedbackStore, agent_id: str, votes: Mapping[str, int], settings: Settings
) -> str | None:
    """Return what an agent's votes, counted by kind, lack for a reward to be learnt, or None."""
    reward = settings.reward
    if reward.given is not None:
        return None
    voters = store.votes_by_voter(agent_id, list(reward.kinds), most=FEW_VOTERS)
    held_out = settings.feedback.evaluation_share
    ties, sides = store.ties(agent_id), store.sides(agent_id)
    return reward_lacks(votes, sides, reward, voters, held_out=held_out, ties=ties)


def reward_lacks(
    votes: Mapping[str, int],
    sides: Mapping[str, tuple[int, int]],
    reward: RewardSettings,
    voters: Mapping[str, int] | None = None,
    *,
    held_out: float = 0.0,
    ties: int = 0,
) -> str | None:
    """Return what is too little for a reward to be learnt, or probably is.

    None where there may be enough. `votes` are effective votes by kind, `sides` how many of them
    are for and against, where that is known, and `voters` who gave how many of those that teach:
    None where many did, who fall to the models as these need them. `held_out` is the part of the
    conversations kept for judging; whose votes those are nobody knows before they are read. `ties`
    are how many of the preferences are one: they teach, and judge nothing.
    """
    if reward.given is not None:
        return None
    least, taught = len(JOBS) * reward.min_pairs, sum(votes.get(kind, 0) for kind in reward.kinds)
    if taught >= least:
        return (
            _judge_lacks(votes, sides, reward.kinds, ties)
            or _model_lacks(voters or {}, reward, held_out)
            or _probably_lacks("", taught, least, held_out)
            or _judge_lacks(votes, sides, reward.kinds, ties, held_out)
        )
    others = {kind: n for kind, n in votes.items() if kind in TEACHING and kind not in reward.kinds}
    told = ", ".join(f"{kind} {n:,}" for kind, n in others.items())
    more = f"; {told} would count where reward.kinds names them" if told else ""
    # Whoever names them is to know before the next turn says so.
    if told and _judge_lacks(votes, sides, [*reward.kinds, *others], ties):
        more += f"; judging one takes {JUDGING}"
    return f"{taught:,} votes to learn from ({', '.join(reward.kinds)}) of at least {least}{more}"


def _probably_lacks(whose: str, votes: int, least: int, held_out: float) -> str | None:
    """Return that of so many votes too few are likely to teach, or None."""
    left = votes * (1 - held_out)
    if left >= least:
        return None
    return (
        f"probably too few votes{whose}: of {votes:,} some {int(left):,} are to learn from, of at "
        f"least {least}, as {held_out:.0%} of the conversations are kept for judging "
        "(feedback.evaluation_share); collect some more"
    )


def _model_lacks(voters: Mapping[str, int], reward: RewardSettings, held_out: float) -> str | None:
    """Return which reward model too few votes fall to, where it is known whose they are, or None.

    Of what a voter gave some is kept for judging.
    """
    if not voters:
        return None
    shares = reward.shares.by_job()
    taught: Counter[str] = Counter()
    for voter, count in voters.items():
        taught[job_of(voter, shares)] += count
    job = min(JOBS, key=lambda one: taught[one])
    if taught[job] >= reward.min_pairs:
        whose = f" for the {job} reward model"
        return _probably_lacks(whose, taught[job], reward.min_pairs, held_out)
    who = "one rater" if len(voters) == 1 else f"{len(voters):,} raters"
    left = int(taught[job] * (1 - held_out))
    return (
        f"{left:,} votes for the {job} reward model to learn from of at least {reward.min_pairs}: "
        f"{who} gave all {sum(voters.values()):,}, and no rater teaches two models; ask several "
        "more people"
    )


def _judge_lacks(
    votes: Mapping[str, int],
    sides: Mapping[str, tuple[int, int]],
    kinds: Collection[str],
    ties: int,
    held_out: float = 0.0,
) -> str | None:
    """Return what is too little for a reward to be judged that learns from these kinds, or None.

    With `held_out`, what probably is, as only so large a part of the votes judges.
    """
    part = held_out or 1.0
    compared = sum(votes.get(kind, 0) for kind in PAIRS_ALONE) - ties
    single = [kind for kind in kinds if kind not in PAIRS_ALONE and votes.get(kind)]
    twos = sum(min(sides.get(kind, (votes[kind] // 2,))) for kind in single)
    if part * compared >= FEWEST_JUDGED or part * twos >= FEWEST_MATCHED:
        return None
    apart = f" (and {ties:,} ties, which are none)" if ties else ""
    told = [f"{compared} preferences and corrections{apart}"]
    for kind in single:
        of = "{:,} liked and {:,} not".format(*sides[kind]) if kind in sides else f"{votes[kind]:,}"
        told.append(f"{kind} {of}")
    found = f"{', '.join(told)} to judge one by"
    if held_out:
        found = (
            f"probably too few votes: {found}, of which some {held_out:.0%} are on held-out "
            "prompts (feedback.evaluation_share)"
        )
    return f"{found}, which takes {JUDGING}; the review page asks people for some"


def unfinished(database: Database, history: list[Claim], settings: Settings) -> Claim | None:
    """Return an agent's newest attempt that has trained reward models and did not end, or None.

    What had finished is not trained again where the same votes are trained from, so these come
    before what was voted since: else an hour without MLflow costs a night, and a turn that takes
    longer than its deadline never ends. Not after the last attempt (what a person interrupted is
    none), nor on votes that came to a
    verdict before, nor where an erasure took some of them out or some were taken back, nor from one
    who is champion no more (but for this very turn's version, whose promotion an attempt did not
    outlive).
    """
    failed = [claim for claim in failed_since_verdict(history) if claim.watermark > 0]
    if not failed or failed[-1].state == "held":
        return None
    latest, agent_id = failed[-1], failed[-1].agent_id
    tried = [claim for claim in history if claim.fingerprint == latest.fingerprint]
    folder = settings.turn_folder(agent_id, latest.fingerprint)
    most = settings.continuous_learning.max_attempts
    if (
        sum(claim.reason != INTERRUPTED for claim in tried) >= most
        or any(claim.state == "done" for claim in tried)
        or not (folder / REWARD).exists()
        or not (folder / BEGAN).exists()
    ):
        return None
    moves = PromotionLedger(database).history(agent_id)
    if not moves or taken_out_since(database, latest) is not None:
        return None
    moved = moves[-1]
    own = moved.action == "promote" and moved.token in {claim.token for claim in tried}
    began = read_json(folder / BEGAN)["champion"]
    return latest if own or moved.version == began else None


def taken_out_since(database: Database, claim: Claim) -> str | None:
    """Return what became of votes that the claim's turn learned from, in words; None of none.

    What is made of them is not gone on with.
    """
    if erased_since(database, claim):
        return "somebody was erased"
    if FeedbackStore(database).withdrawn_from(claim.agent_id, claim.watermark):
        return "some were taken back"
    return None


def attempts_at(watermark: int, history: list[Claim]) -> list[Claim]:
    """Return the claims on the votes up to the watermark, oldest first."""
    return [claim for claim in history if claim.watermark == watermark]


def failed_since_verdict(history: list[Claim]) -> list[Claim]:
    """Return the attempts after the newest that came to its verdict, oldest first."""
    done = max((n for n, claim in enumerate(history, 1) if claim.state == "done"), default=0)
    return history[done:]


def back_off(failures: int) -> timedelta:
    """Return how long to wait after so many failures in a row, one or more."""
    times: float = min(2 ** (failures - 1), LONGEST_BACK_OFF / BACK_OFF)
    return BACK_OFF * times


def minutes_in_a_day(history: list[Claim], at: datetime, *, longest: timedelta) -> float:
    """Return how many minutes the claims were at work in the 24 hours before a moment.

    One that seems to have taken longer than the `longest`, at which a run is ended, took no longer:
    a clock that jumped ahead meanwhile dated its end.
    """
    start, seconds = at - timedelta(hours=24), 0.0
    for claim in history:
        began = max(claim.created_at, start)
        ended = min(claim.heartbeat_at, claim.created_at + longest, at)
        seconds += max(0.0, (ended - began).total_seconds())
    return seconds / 60
