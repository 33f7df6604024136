"""Any order of registering, promoting, going back and experimenting, beside a model of a few lines.

The model knows no database, no entries and no times: a list of champions and who is out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from rlhf_pipeline.database import Database
from rlhf_pipeline.errors import ClaimLost, RegistryError, StalePromotion
from rlhf_pipeline.experiment.book import Experiment, ExperimentBook
from rlhf_pipeline.feedback.claims import ClaimBook
from rlhf_pipeline.registry.ledger import Outcome, Promotion, PromotionLedger
from tests.machines import play

ANY = st.integers(min_value=0, max_value=6)  # modulo the versions there are
WHO: dict[str, Any] = {"actor": "ann", "reason": "why not"}


class Lifecycle(RuleBasedStateMachine):
    """The ledger and the experiments of one agent."""

    def __init__(self, database: Database, moment: list[datetime], number: int) -> None:
        super().__init__()
        self.ledger, self.book = PromotionLedger(database), ExperimentBook(database)
        self.claims = ClaimBook(database, clock=lambda: moment[0])
        self.moment, self.agent = moment, f"agent-{number}"
        self.earliest = self.latest = moment[0]
        self.passed: list[bool | None] = [None]  # by version, what the gate said
        self.model: list[int] = [0]  # by version, which files
        self.line = [0]  # whoever is gone back to, the champion last
        self.baselines = {0}
        self.out: set[int] = set()  # models that were gone back from, or lost
        self.running: Experiment | None = None
        self.met_another = False  # the one that runs: another champion, as it began with
        self.told: list[Promotion] = []
        made: dict[str, Any] = {"label": "v0", "path": Path("/m/0"), "files": {"m": "0"}}
        self.ledger.add_baseline(self.agent, lineage={}, actor="ann", **made)

    @property
    def champion(self) -> int:
        return self.line[-1]

    @property
    def previous(self) -> int | None:
        """Return who is gone back to: the last before that nothing speaks against, if any is.

        Of another model than the champion; else the last before that was champion first.
        """
        models = [self.model[v] for v in self.line]
        before = [v for v in self.line[::-1] if self.model[v] != models[-1]]
        first = models.index(models[-1])
        else_to = self.line[first - 1] if first else None
        return next((v for v in before if self.model[v] not in self.out), else_to)

    def may(self, version: int) -> bool:
        """Say whether the version may become champion without force."""
        judged = self.passed[version] is True or version in self.baselines
        return judged and self.model[version] not in self.out

    def moved(self, version: int, *, back: bool) -> None:
        """Have the champion moved in the model."""
        if back:
            self.out.add(self.model[self.champion])
            while version in self.line and self.champion != version:
                self.line.pop()
        if self.champion != version:
            self.line.append(version)
        self.met_another = True
        self.out.discard(self.model[version])

    def refused(self, call: Callable[[], Outcome], error: type[Exception]) -> None:
        with pytest.raises(error):
            call()

    @rule(passed=st.sampled_from([True, True, False, None]), twin=ANY, same=st.booleans())
    def a_turn_registers(self, passed: bool | None, twin: int, same: bool) -> None:
        number = len(self.passed)
        files = self.model[twin % number] if same else number
        gate = None if passed is None else {"passed": passed, "results": []}
        version = self.ledger.add_version(
            self.agent,
            label="v",
            path=Path(f"/m/{number}"),
            files={"m": str(files)},
            lineage={},
            gate=gate,
            fingerprint=str(number),
        )
        assert version.version == number
        self.passed.append(passed)
        self.model.append(files)

    @rule(which=ANY, force=st.booleans())
    def somebody_promotes(self, which: int, force: bool) -> None:
        version, champion = which % len(self.passed), self.champion

        def promote() -> Outcome:
            return self.ledger.promote(
                self.agent, version, expected_champion=champion, force=force, **WHO
            )

        if version != champion and not force and not self.may(version):
            self.refused(promote, RegistryError)
            return
        forced = version != champion and not self.may(version)
        outcome = promote()
        assert outcome.changed == (version != champion)
        if outcome.changed:
            assert outcome.promotion.reason.startswith("forced") == forced
            self.moved(version, back=False)

    @rule(which=ANY)
    def somebody_promotes_who_saw_another_champion(self, which: int) -> None:
        version = which % len(self.passed)
        if version == self.champion:
            return
        seen = self.champion + 1
        self.refused(
            lambda: self.ledger.promote(
                self.agent, version, expected_champion=seen, force=True, **WHO
            ),
            StalePromotion,
        )

    @rule(which=ANY)
    def the_alias_is_moved_by_hand(self, which: int) -> None:
        version, champion = which % len(self.passed), self.champion

        def adopt() -> Outcome:
            return self.ledger.adopt(self.agent, version, expected_champion=champion, **WHO)

        judged = self.passed[version] is True or version in self.baselines
        if version != champion and not judged:
            self.refused(adopt, RegistryError)
        elif adopt().changed:
            self.moved(version, back=version in self.line)

    @rule()
    def somebody_goes_back(self) -> None:
        def back() -> Outcome:
            return self.ledger.rollback(self.agent, **WHO)

        target = self.previous
        if target is None:
            self.refused(back, RegistryError)
            return
        assert back().promotion.version == target
        self.moved(target, back=True)

    @rule(which=ANY)
    def somebody_goes_back_to(self, which: int) -> None:
        version = which % len(self.passed)

        def back() -> Outcome:
            return self.ledger.rollback(self.agent, to=version, **WHO)

        ever = {entry.version for entry in self.told}
        if version == self.champion:
            assert not back().changed
        elif version not in ever or len(self.line) < 2:
            self.refused(back, RegistryError)
        else:
            assert back().promotion.version == version
            self.moved(version, back=True)

    @rule()
    def the_champion_is_made_the_baseline(self) -> None:
        outcome = self.ledger.reset_baseline(self.agent, **WHO)
        self.baselines.add(self.champion)
        if outcome.changed:  # a person stands by it, whatever an experiment found meanwhile
            self.out.discard(self.model[self.champion])

    @precondition(lambda self: self.running is None and len(self.passed) > 1)
    @rule(which=ANY)
    def an_experiment_begins(self, which: int) -> None:
        challenger = which % len(self.passed)
        if challenger != self.champion:
            self.met_another = False
            self.running = self.book.start(
                self.agent, champion=self.champion, challenger=challenger, share=0.5, actor="ann"
            )

    @precondition(lambda self: self.running is not None)
    @rule(state=st.sampled_from(["rolled_back", "timed_out", "stopped"]))
    def the_experiment_ends(self, state: Any) -> None:
        assert self.running is not None
        if self.met_another:
            state = "stopped"  # whoever looks at it finds so, and nobody lost to that one
        # It took days, by which no clock is set back: what came before and after it is no question.
        self.moment[0] = self.earliest = self.latest
        assert self.book.end(self.running, state, "the numbers")
        if state == "rolled_back":
            self.out.add(self.model[self.running.challenger])
        self.running = None

    @precondition(lambda self: self.running is not None)
    @rule(ended_meanwhile=st.booleans())
    def the_experiment_promotes(self, ended_meanwhile: bool) -> None:
        running = self.running
        assert running is not None
        version = running.challenger

        def promote() -> Outcome:
            return self.ledger.promote(
                self.agent,
                version,
                expected_champion=running.champion,
                experiment=running.experiment_id,
                **WHO,
            )

        if version == self.champion:
            return  # the experiment's own look ends it
        if ended_meanwhile:
            self.book.end(running, "stopped", "by hand")
            self.running = None
        if ended_meanwhile or running.champion != self.champion or not self.may(version):
            self.refused(promote, RegistryError)  # a StalePromotion is one
        else:
            assert promote().changed
            self.moved(version, back=False)
            self.running = None

    @rule(which=ANY)
    def a_run_wakes_up_that_lost_its_claim(self, which: int) -> None:
        old = self.claims.claim(self.agent, "print", 1, holder="old", asked_by="sensor")
        self.claims.finish(old.token, "failed", "its machine was away")
        new = self.claims.claim(self.agent, "print", 1, holder="new", asked_by="sensor")
        version = which % len(self.passed)
        if version != self.champion:
            self.refused(
                lambda: self.ledger.promote(
                    self.agent,
                    version,
                    expected_champion=self.champion,
                    token=old.token,
                    force=True,
                    **WHO,
                ),
                ClaimLost,
            )
        self.claims.let_go(new.token)

    @rule(seconds=st.integers(min_value=-90, max_value=90))
    def the_clock_is_set(self, seconds: int) -> None:
        self.moment[0] = max(self.earliest, self.moment[0] + timedelta(seconds=seconds))

    @invariant()
    def the_ledger_says_what_the_model_says(self) -> None:
        self.moment[0] += timedelta(milliseconds=1)
        self.latest = max(self.latest, self.moment[0])
        standing = self.ledger.standing(self.agent)
        assert standing.champion is not None
        assert self.ledger.champions(self.agent) == self.line
        assert standing.champion.version == self.champion
        previous = standing.previous
        assert (None if previous is None else previous.version) == self.previous
        assert set(standing.withdrawn) == {
            v for v, model in enumerate(self.model) if model in self.out
        }
        waiting = [
            v
            for v, passed in enumerate(self.passed)
            if passed and v > self.champion and self.model[v] not in self.out
        ]
        assert [v.version for v in standing.waiting] == waiting
        challenger = standing.challenger
        assert (None if challenger is None else challenger.version) == max(waiting, default=None)

    @invariant()
    def no_entry_ever_changes(self) -> None:
        history = self.ledger.history(self.agent)
        assert history[: len(self.told)] == self.told
        assert [entry.entry for entry in history] == list(range(1, len(history) + 1))
        before = [None, *(entry.version for entry in history[:-1])]
        assert [entry.previous_version for entry in history] == before
        self.told = history


def played(runs: int, steps: int) -> None:
    """Play so many runs of so many steps."""
    numbers, moment = count(), [datetime(2026, 1, 1, tzinfo=UTC)]
    database = Database("sqlite://")
    with pytest.MonkeyPatch.context() as patch:
        for module in ("records", "experiment.book"):
            patch.setattr(f"rlhf_pipeline.{module}.now", lambda: moment[0])
        play(lambda: Lifecycle(database, moment, next(numbers)), runs, steps)
    database.close()


def test_nobody_becomes_champion_who_may_not_whatever_the_order() -> None:
    played(runs=15, steps=20)


@pytest.mark.slow
def test_nobody_becomes_champion_who_may_not_in_a_thousand_runs() -> None:
    played(runs=1000, steps=30)
