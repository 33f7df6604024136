"""What is worth a person's look though nothing has failed, each with what to do about it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import takewhile
from typing import TYPE_CHECKING

import structlog

from rlhf_pipeline.continuous import is_young
from rlhf_pipeline.errors import ConfigError, PipelineError
from rlhf_pipeline.experiment.watch import WATCH, is_trouble
from rlhf_pipeline.feedback.claims import AHEAD
from rlhf_pipeline.overview import HUNDREDTH
from rlhf_pipeline.registry.models import cached_folder

if TYPE_CHECKING:
    from rlhf_pipeline.config import Settings
    from rlhf_pipeline.overview import Overview

log = structlog.get_logger(__name__)

UNSEEN, UNSOUND = "not_looked_at", "settings_unsound"
BLIND = (UNSEEN, UNSOUND)  # who is told one of these is told nothing else
SHORTEST = 4  # characters of a part of a name in which one may be a slip
DECIDED = timedelta(minutes=10)  # after a version is registered, where nobody has to be asked


@dataclass(frozen=True, slots=True)
class Alert:
    """One thing to look at; its key says whether it was told before."""

    name: str
    agent_id: str
    words: str
    entry: int | None = None  # the ledger's that it is about; another is told as well

    @property
    def key(self) -> str:
        """Return what is told once."""
        about = "" if self.entry is None else f"/{self.entry}"
        return f"{self.agent_id}/{self.name}{about}"


def alerts_about(
    agent_id: str,
    settings_of: Callable[[str], Settings],
    overview_of: Callable[[str, Settings], Overview],
    *,
    at: datetime,
) -> list[Alert]:
    """Return what is worth a look about an agent: where nobody can look, that alone.

    So one agent's damaged file or lost recipe keeps nobody from hearing of the others.
    """
    try:
        settings = settings_of(agent_id)
        return alerts_of(overview_of(agent_id, settings), settings, at=at)
    except ConfigError as error:
        words = f"no turn starts and nothing is pruned until its recipe loads: {error}"
        return [Alert(UNSOUND, agent_id, words)]
    except Exception as error:
        log.exception("agent not looked at", agent=agent_id)
        # What anything else says may quote what people wrote, and this goes out to a webhook.
        why = str(error) if isinstance(error, PipelineError) else type(error).__name__
        words = f"nothing else is told of it until it can be looked at: {why}; the log says more"
        return [Alert(UNSEEN, agent_id, words)]


def alerts_of(overview: Overview, settings: Settings, *, at: datetime) -> list[Alert]:
    """Return what is worth a look in where the agent stands, judged by `settings.alerts`."""
    found: list[Alert] = []
    rules, votes = settings.alerts, overview.votes

    def alert(name: str, words: str) -> None:
        found.append(Alert(name, overview.agent_id, words))

    lately = sum(sum(counts) for counts in votes.by_kind.values())
    if votes.newest_at is not None and lately:
        quiet = at - votes.newest_at
        if quiet > timedelta(hours=rules.quiet_hours):
            alert(
                "feedback_dried_up",
                f"no vote for {quiet / timedelta(hours=1):.0f} hours; look whether the assistant "
                "still sends them",
            )
    share = votes.top_share
    if share is not None and votes.voters >= HUNDREDTH and share > rules.busiest_share:
        alert(
            "few_people_vote_most",
            f"{share:.0%} of the signed votes are of the busiest hundredth; look at them with "
            "`rlhf feedback export`",
        )
    together, most = overview.network_share, settings.experiments.people_per_network
    if together is not None and most is not None and together > rules.network_share:
        alert(
            "one_network",
            f"{together:.0%} of the newest people at the chat page are of one network, and count "
            f"as {most}; where it is a proxy's, name that in FORWARDED_ALLOW_IPS; where people "
            "share it, raise experiments.people_per_network; else somebody comes again and again",
        )
    if overview.drift is not None and overview.drift["drifted"]:
        # Of those that changed beyond chance: where votes are few, another's PSI may be larger.
        # What an early release wrote names neither them nor their limits.
        every = overview.drift["psi"]
        psi = {name: every[name] for name in overview.drift.get("features", every)}
        most = max(psi, key=lambda name: psi[name])
        limit = overview.drift.get("limits", {}).get(most)
        above = "" if limit is None else f", above {limit:.2f}"
        alert(
            "drift",
            f"the newest snapshot's new votes differ from the votes before, most in {most} "
            f"(PSI {psi[most]:.2f}{above}); its report is beside it",
        )
    found += _about_the_champion(overview, settings)
    judged = [standing.passed for standing in overview.standings if standing.passed is not None]
    refused = len(list(takewhile(lambda passed: not passed, judged)))
    if refused >= rules.refused_in_a_row:
        alert(
            "gate_refuses",
            f"the newest {refused} versions were refused; `rlhf explain VERSION` says why",
        )
    experiment = overview.experiment
    met = experiment.challenger if experiment and experiment.state == "running" else None
    for standing in overview.standings:
        number, agent_id = standing.version, overview.agent_id
        waits = "challenger" in standing.roles and number != met
        if waits and not is_young(at - standing.created_at, DECIDED):
            alert(
                "version_waits",
                f"version {number} passed the gate and waits for a person: `rlhf promote {number} "
                f"--agent {agent_id}`, or /candidates/{agent_id} in the service",
            )
    could, learns = overview.enough_since, settings.continuous_learning
    enough = overview.waiting_votes >= learns.min_new_feedback  # a mind changed is one vote
    is_on = settings.training.enabled and learns.enabled and overview.paused is None
    if could is not None and enough and is_on:
        if experiment is not None:  # no turn starts beside one that runs
            ended = experiment.ended_at or at
            # Of one that a clock far ahead dated nobody knows when it ended.
            could = max(could, ended) if ended <= at + AHEAD else could
        if at - could > timedelta(days=rules.overdue_days):
            last = overview.last_turn
            began = f"{(at - last.created_at).days} days ago" if last else "never"
            alert(
                "reward_model_stale",
                f"{overview.waiting_votes:,} votes wait, enough for a turn for "
                f"{(at - could).days} days; the last one began {began}; look at its sensor in "
                "Dagster, or `make train`",
            )
    if experiment is not None and experiment.state == "invalid":
        alert("experiment_imbalance", experiment.reason)
    return found


def _about_the_champion(overview: Overview, settings: Settings) -> Iterator[Alert]:
    """Yield what speaks against who answers now: what was done and what a person may."""
    agent_id, found, rules = overview.agent_id, overview.failures, settings.experiments
    leave = f"`rlhf rollback --agent {agent_id} --reason WHY`"
    if overview.moved is not None and overview.moved.actor == WATCH:
        yield Alert(
            "rolled_back",
            agent_id,
            f"{overview.moved.reason}; version {overview.moved.version} answers again",
            overview.moved.entry,
        )
    champion = overview.champion
    if champion is not None and not any(
        place.is_dir() for place in (champion.path, cached_folder(settings.mlflow_folder, champion))
    ):
        yield Alert(
            "champion_lost",
            agent_id,
            f"the files of version {champion.version}, the champion, are not in {champion.path}: "
            "only MLflow's copy may be left, and where that has gone too the baseline answers "
            f"instead; put them back from a backup, or {leave}",
        )
    if found is not None and is_trouble(
        found, most=rules.trouble_answers, share=rules.trouble_share
    ):
        yield Alert(
            "champion_fails",
            agent_id,
            f"the champion {found.words}; {leave}, or look at the service's log",
        )
    roles = {role: standing for standing in overview.standings for role in standing.roles}
    now, before = roles.get("champion"), roles.get("previous")
    if now is None or before is None or now.satisfaction is None or before.satisfaction is None:
        return
    if now.satisfaction + (now.margin or 0.0) < before.satisfaction - (before.margin or 0.0):
        yield Alert(
            "liked_less",
            agent_id,
            f"people like version {now.version} ({now.satisfaction:.2f} ± {now.margin:.2f}, "
            f"{now.votes} of them) less than version {before.version} before it "
            f"({before.satisfaction:.2f} ± {before.margin:.2f}); other people on other days, so "
            f"nothing was done: {leave}, or an experiment to be sure",
        )


def name_alerts(agent_ids: Sequence[str]) -> list[Alert]:
    """Return an alert for each agent that is named nearly like an older one; oldest come first.

    A name makes an agent, so a misspelt one keeps votes from the agent they are about.
    """
    found = []
    for place, agent_id in enumerate(agent_ids):
        older = next((other for other in agent_ids[:place] if _is_misspelt(agent_id, other)), None)
        if older is not None:
            words = (
                f"it is named nearly like {older} and kept apart from it; where {older} is meant, "
                "correct who sends its votes, and send them again by that name"
            )
            found.append(Alert("name_alike", agent_id, words))
    return found


def _is_misspelt(name: str, other: str) -> bool:
    """Say whether two names differ as slips do: in case, in a sign between parts, in one letter.

    Numbers are meant, and so are parts of three characters or fewer (en, de, eu).
    """
    ours, theirs = (re.split("[-_]", one.casefold()) for one in (name, other))
    if "".join(ours) == "".join(theirs):
        return True
    parts = [both for both in zip(ours, theirs, strict=False) if both[0] != both[1]]
    return len(ours) == len(theirs) and len(parts) == 1 and _one_slip(*sorted(parts[0], key=len))


def _one_slip(short: str, long: str) -> bool:
    """Say whether one letter lacks, is another, or stands before the one that it follows."""
    pairs = enumerate(zip(short, long, strict=False))
    at = next((i for i, (one, other) in pairs if one != other), len(short))
    letters = short[at : at + 1] + long[at : at + 1]
    if len(short) < SHORTEST or any(map(str.isdigit, letters)):
        return False
    if len(short) < len(long):
        return short[at:] == long[at + 1 :]
    turned = short[at + 1 : at + 2] + short[at : at + 1] + short[at + 2 :]
    return short[at + 1 :] == long[at + 1 :] or turned == long[at:]


def disk_alerts(settings: Settings) -> list[Alert]:
    """Return an alert where the disk that the state lies on is nearly full."""
    free = shutil.disk_usage(settings.state_dir).free / 2**30
    if free >= settings.alerts.disk_gib:
        return []
    words = (
        f"{free:.1f} GiB free, wanted {settings.alerts.disk_gib}; remove old turns (`rlhf prune`, "
        "which needs a few MiB itself) or backups"
    )
    return [Alert("disk_nearly_full", "every agent", words)]
