"""The models that answer, loaded: each agent's champion and baseline, as the ledger has them.

A watcher looks at the ledger every LOOK_EVERY_SECONDS: a new champion is loaded beside the old one
and takes its place; what the old one is writing it finishes. Models load one after the other, for
memory's sake, and whoever has one here waits for none of the others. Files are held against the
ledger's hashes before they are loaded. What this does not see: files that change after they were
loaded.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import sqlalchemy as sa
import structlog

from rlhf_pipeline.config import own_settings
from rlhf_pipeline.errors import ModelError, PipelineError, RegistryError
from rlhf_pipeline.experiment.book import ExperimentBook
from rlhf_pipeline.logs import ToldOnce
from rlhf_pipeline.records import hashed

if TYPE_CHECKING:
    from rlhf_pipeline.config import PolicySettings, Settings
    from rlhf_pipeline.feedback.store import FeedbackStore
    from rlhf_pipeline.registry.ledger import ModelVersion
    from rlhf_pipeline.registry.models import ModelRegistry
    from rlhf_pipeline.serving.batching import Decoder

log = structlog.get_logger(__name__)

Arm = Literal["champion", "challenger", "baseline"]

LOOK_EVERY_SECONDS = 2.0  # how long a new champion may go unseen
TRY_AGAIN_SECONDS = 15.0  # after a model could not be loaded


@dataclass(frozen=True, slots=True)
class Seat:
    """A version that answers."""

    version: ModelVersion
    decoder: Decoder
    limits: PolicySettings  # how it runs: as the agent's own recipe says, within its context
    digest: str  # one hash of all its files' hashes


@dataclass(frozen=True, slots=True)
class _Unfit:
    """A version that could not be loaded, and why."""

    version: int
    error: PipelineError
    since: float


class Champions:
    """Loaded models by agent and arm; a version that holds both arms is loaded once."""

    def __init__(self, settings: Settings, store: FeedbackStore, registry: ModelRegistry) -> None:
        self.settings = settings
        self.store = store
        self.registry = registry
        self._seats: dict[tuple[str, Arm], Seat | _Unfit] = {}
        self._loading = threading.Lock()  # held while a model loads
        self._looking = threading.Lock()  # held for moments, also by who holds _loading
        self._asked: dict[tuple[str, Arm], Future[Seat | _Unfit]] = {}  # what requests wait for
        self._asking = threading.Lock()
        self._beside: set[str] = set()  # whose challengers are being loaded for who comes next
        self.is_preloading = False  # from the service's start until each champion was tried
        self._blind = ToldOnce(
            log,
            "the ledger cannot be read: no new champion is seen now",
            "the ledger can be read again",
        )
        self._watcher: threading.Thread | None = None
        self._closed = threading.Event()

    def agents(self) -> list[str]:
        """Return the agents that have a champion."""
        known = self.store.agents()
        return [agent for agent in known if self.registry.ledger.champion(agent) is not None]

    def ready(self, agent_id: str, arm: Arm) -> Seat | None:
        """Return the loaded model without waiting, None where `seat` has work to do."""
        seat = self._seats.get((agent_id, arm))
        return seat if isinstance(seat, Seat) else None

    def why_unfit(self, agent_id: str, version: int) -> PipelineError | None:
        """Return why the version could not be loaded here when that was last tried, or None."""
        for (agent, _), seat in list(self._seats.items()):
            if agent == agent_id and isinstance(seat, _Unfit) and seat.version == version:
                return seat.error
        return None

    async def seat(self, agent_id: str, arm: Arm) -> Seat:
        """Return the model of the arm, loaded now if need be.

        All who ask for it while it loads wait for one thread, and whoever leaves ends nothing.
        Raises RegistryError where the agent has none, HashMismatch or ModelError where it is not
        fit to serve.
        """
        seat = self._seats.get((agent_id, arm))
        if seat is None:
            seat = await asyncio.wrap_future(self._ask(agent_id, arm))
        if isinstance(seat, _Unfit):
            raise seat.error
        return seat

    def _ask(self, agent_id: str, arm: Arm) -> Future[Seat | _Unfit]:
        """Return what a look at the arm will find; one that is under way serves all who ask."""
        key = (agent_id, arm)
        with self._asking:
            asked = self._asked.get(key)
            if asked is None:
                asked = Future()
                asked.set_running_or_notify_cancel()  # from here on nobody can cancel it
                # Not the loop's executor, whose few threads are everybody's, nor another, for
                # whose threads the process waits at its end.
                threading.Thread(
                    target=self._answer, args=(agent_id, arm, asked), name="seat", daemon=True
                ).start()
                self._asked[key] = asked
            return asked

    def _answer(self, agent_id: str, arm: Arm, asked: Future[Seat | _Unfit]) -> None:
        try:
            asked.set_result(self._look(agent_id, arm))
        except BaseException as error:  # noqa: BLE001 - every waiting request must hear of it
            asked.set_exception(error)
        finally:
            with self._asking:
                del self._asked[agent_id, arm]

    def prepared(self, agent_id: str, champion: int, challenger: int) -> bool:
        """Say whether an experiment's versions are its arms here, and none is found unfit.

        Where the challenger is not, it is loaded beside. The champion comes first, where none is
        loaded: it answers meanwhile. One that was promoted a moment ago takes its place by itself.
        For one that is unfit the baseline answers, which is easily better or worse than it.
        """
        answers = self._seats.get((agent_id, "champion"))
        if isinstance(answers, _Unfit) or (answers and answers.version.version != champion):
            return False
        seat = self._seats.get((agent_id, "challenger"))
        if seat is not None and _version_of(seat) == challenger:
            return isinstance(seat, Seat)
        if agent_id not in self._beside and (agent_id, "champion") in self._seats:
            self._beside.add(agent_id)
            threading.Thread(target=self._load_beside, args=(agent_id,), daemon=True).start()
        return False

    def _load_beside(self, agent_id: str) -> None:
        self._look_if_possible(agent_id, "challenger")
        self._beside.discard(agent_id)

    def preload_beside(self) -> None:
        """Begin to preload; the service is not ready until the champions are loaded, or failed."""
        self.is_preloading = True
        threading.Thread(target=self.preload, name="preload", daemon=True).start()

    def preload(self) -> None:
        """Load every champion that answers here, and every challenger that people meet, so that no
        first question waits for it.
        """
        try:
            here = set(self.agents()) - set(self.settings.serving.upstreams)
            for agent_id in sorted(here):
                self._look_if_possible(agent_id, "champion")
        finally:
            self.is_preloading = False
        for experiment in ExperimentBook(self.store.database).all_running():
            if experiment.agent_id in here:
                self._look_if_possible(experiment.agent_id, "challenger")

    def decoders(self) -> list[Decoder]:
        """Return every decoder in service."""
        return list({id(seat.decoder): seat.decoder for seat in self._answering()}.values())

    def close(self) -> None:
        """Stop watching, begin no more loads, and let the decoders finish.

        The event loop closes, so this waits for no lock: a load that is under way lets go of its
        model itself, or ends with the process.
        """
        self._closed.set()
        for decoder in self.decoders():
            decoder.retire()
        self._seats.clear()

    def _answering(self) -> list[Seat]:
        """Return the models in place, as of this moment: close() takes them away at any."""
        return [seat for seat in list(self._seats.values()) if isinstance(seat, Seat)]

    # -- looking ----------------------------------------------------------------------------------

    def _look_if_possible(self, agent_id: str, arm: Arm) -> None:
        """Look, where no request waits for what comes of it: the next one finds out and says so."""
        if self._closed.is_set():
            return
        try:
            self._look(agent_id, arm)
        except sa.exc.DBAPIError as error:  # what is loaded goes on
            self._blind.met(error.orig)
            return
        except RegistryError as error:  # an experiment is over
            log.info("an arm is empty", agent=agent_id, arm=arm, why=str(error))
        except ModelError as error:  # the service ends
            log.info("an arm is not loaded", agent=agent_id, arm=arm, why=str(error))
        except Exception:  # what is loaded goes on
            log.exception("an arm could not be looked at", agent=agent_id, arm=arm)
            return
        self._blind.over()

    def _look(self, agent_id: str, arm: Arm) -> Seat | _Unfit:
        """Bring one arm up to what the ledger says and return it."""
        with self._looking:
            found = self._here(agent_id, arm)
        if isinstance(found, Seat | _Unfit):
            return found
        with self._loading:
            if self._closed.is_set():
                raise ModelError(
                    f"agent {agent_id!r} needs its {arm} loaded, found a service that ends; ask "
                    "again when it is back"
                )
            with self._looking:  # it may have been loaded meanwhile, or another be wanted now
                found = self._here(agent_id, arm)
            if isinstance(found, Seat | _Unfit):
                return found
            seat = self._loaded(agent_id, found)
            with self._looking:
                self._take(agent_id, arm, seat)
            if self._closed.is_set() and isinstance(seat, Seat):  # close() may have missed it
                seat.decoder.retire()
                self._seats.clear()
            settle()
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="champions", daemon=True)
                self._watcher.start()
            return seat

    def _here(self, agent_id: str, arm: Arm) -> Seat | _Unfit | ModelVersion:
        """Return what the arm has as the ledger says, else the version that is to be loaded."""
        version = self._version(agent_id, arm)
        if version is None:
            self._leave(agent_id, arm)
            raise RegistryError(
                f"agent {agent_id!r} needs a {arm} to answer, found none; its first turn "
                "trains version 0"
            )
        before = self._seats.get((agent_id, arm))
        if isinstance(before, Seat) and before.version.version == version.version:
            return before
        if (
            isinstance(before, _Unfit)
            and before.version == version.version
            and time.monotonic() - before.since < TRY_AGAIN_SECONDS
        ):
            return before
        for seat in self._answering():
            if (seat.version.agent_id, seat.version.version) == (agent_id, version.version):
                self._take(agent_id, arm, seat)
                return seat
        return version

    def _take(self, agent_id: str, arm: Arm, seat: Seat | _Unfit) -> None:
        """Put a model in its place; what the one before it is writing it finishes."""
        before = self._seats.get((agent_id, arm))
        self._seats[agent_id, arm] = seat
        if isinstance(before, Seat):
            log.info(f"{arm} changed", agent=agent_id, version=_version_of(seat))
            if not any(seat is before for seat in self._answering()):
                before.decoder.retire()

    def _version(self, agent_id: str, arm: Arm) -> ModelVersion | None:
        """Return who holds the arm: in an experiment its challenger, else as the ledger says."""
        ledger = self.registry.ledger
        if arm == "challenger":
            running = ExperimentBook(self.store.database).running(agent_id)
            return None if running is None else ledger.version(agent_id, running.challenger)
        return ledger.champion(agent_id) if arm == "champion" else ledger.baseline(agent_id)

    def _leave(self, agent_id: str, arm: Arm) -> None:
        """Give up an arm that nobody holds any more; what it is writing it finishes."""
        before = self._seats.pop((agent_id, arm), None)
        if isinstance(before, Seat) and not any(seat is before for seat in self._answering()):
            before.decoder.retire()

    def _loaded(self, agent_id: str, version: ModelVersion) -> Seat | _Unfit:
        from rlhf_pipeline.policy.loading import load_policy
        from rlhf_pipeline.serving.batching import Decoder

        try:
            limits = self.limits(agent_id)
            folder = self.registry.folder_of(version)
            policy = load_policy(
                folder, device=limits.device, dtype=limits.dtype, expected_sha256=version.files
            )
        except PipelineError as error:
            log.error(
                "model unfit to serve", agent=agent_id, version=version.version, why=str(error)
            )
            return _Unfit(version.version, error, time.monotonic())
        except Exception as error:  # of a library, about a file that is not what it should be
            log.exception("model unfit to serve", agent=agent_id, version=version.version)
            unfit = ModelError(
                f"version {version.version} could not be loaded: {error}; see the log"
            )
            return _Unfit(version.version, unfit, time.monotonic())
        files = [part for name in sorted(version.files) for part in (name, version.files[name])]
        fitted = limits.within(policy.context_length)
        if fitted is not limits:
            log.warning(
                "lengths cut down to the model's context",
                agent=agent_id,
                version=version.version,
                context=policy.context_length,
                max_prompt_tokens=fitted.max_prompt_tokens,
                max_completion_tokens=fitted.max_completion_tokens,
            )
        rows = self.settings.serving.batch_rows
        return Seat(version, Decoder(policy, rows=rows), fitted, hashed(*files))

    def limits(self, agent_id: str) -> PolicySettings:
        """Return how the agent's model runs."""
        return self.settings_of(agent_id).policy

    def settings_of(self, agent_id: str) -> Settings:
        """Return the settings of the agent's own recipe, where it has one."""
        return own_settings(self.settings, self.store.recipe_of(agent_id))

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_EVERY_SECONDS):
            for agent_id, arm in list(self._seats):
                self._look_if_possible(agent_id, arm)


def _version_of(seat: Seat | _Unfit) -> int:
    return seat.version if isinstance(seat, _Unfit) else seat.version.version


def settle() -> None:
    """Take what is in memory now out of the search for garbage, after one search of all of it.

    Libraries and models are hundreds of thousands of objects that stay; a full search among them
    holds every request up for a tenth of a second, again and again.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
