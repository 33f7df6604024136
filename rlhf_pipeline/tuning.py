"""A small search over PPO's most telling settings, judged by the stopping reward.

Each trial trains a policy from one turn's champion, with that turn's reward models and prompts, in
a folder named by search and settings. What is known is kept in a journal beside them, so a search
that was killed goes on: finished trials count, the one that ran resumes from its checkpoint. Of a
trial that has ended curves, samples and result stay, and no weights: nobody asks for them. The
gate model is never asked: whoever chooses settings by it could not be judged by it any more.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.errors import TrainingError
from rlhf_pipeline.files import alone_in, write_json, write_text
from rlhf_pipeline.records import Progress, hashed, ignore_progress

if TYPE_CHECKING:
    import optuna

    from rlhf_pipeline.ppo.settings import PpoSettings
    from rlhf_pipeline.stages import Turn

WEIGHTS = ("checkpoints", "policy")  # in a trial's folder
SEARCHED = ("learning_rate", "kl_coef", "clip_range", "epochs")
FACTOR = 10.0  # how far rates and weights may lie from the recipe's, either way
CLIP_RANGE = (0.05, 0.4)
EPOCHS = (1, 6)
KL_COEF = (0.0, 0.5)  # where the recipe has none


@dataclass(frozen=True, slots=True)
class Trial:
    """One set of settings and what became of it."""

    number: int
    settings: Mapping[str, float]  # SEARCHED
    score: float | None  # stopping reward of the chosen update; None where training failed
    kl: float | None  # nats per completion to the reference
    chosen_update: int | None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Search:
    """What a search found; its first trial is the recipe as it stands."""

    trials: tuple[Trial, ...]
    recipe: Mapping[str, float]  # SEARCHED, as it stands
    folder: Path

    @property
    def best(self) -> Trial:
        """Return the trial with the highest score. Raises TrainingError if none ended well."""
        scored = [trial for trial in self.trials if trial.score is not None]
        if not scored:
            reasons = {trial.failure for trial in self.trials}
            raise TrainingError(f"no trial ended well, found only: {'; '.join(map(str, reasons))}")
        return max(scored, key=_score)


def search(
    turn: Turn,
    folder: Path,
    *,
    trials: int,
    updates: int | None = None,
    report: Progress = ignore_progress,
) -> Search:
    """Run the search until it has `trials` finished trials; write table, plot and best settings.

    `updates` shortens each trial. Raises TrainingError for an estimator that has nothing to
    search here, for what memory does not suffice for, where another search is at work in the
    folder, or where no trial ends well.
    """
    import optuna
    from optuna.trial import TrialState

    from rlhf_pipeline.stages import check_memory

    settings = turn.settings.ppo
    if settings.estimator == "dpo":
        raise TrainingError(
            "rlhf tune searches PPO's settings, found ppo.estimator dpo; set gae or rloo"
        )
    if updates is not None:
        settings = replace(settings, updates=updates)
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):  # a second one would train in the place of a trial that runs
        study = _study(folder, turn, settings)
        # What has been searched takes no memory.
        if turn.champion is not None and len(_trials(study)) < trials:
            check_memory(turn, settings)
        while (done := len(_trials(study))) < trials:
            report({"trial": done + 1, "of": trials})
            # Anew for each, so that a search that was killed proposes what it would have.
            seed = settings.seed + done
            study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=5)
            asked = study.ask(_space(settings))
            chosen = replace(settings, **asked.params)
            # Another turn's trial goes on nowhere here.
            place, ended = folder / study.study_name / _name_of(chosen), TrialState.COMPLETE
            try:
                told = _train(turn, place, chosen, _naming(done + 1, report))
            except TrainingError as error:
                told, ended = {"failure": str(error)}, TrialState.FAIL
            for name, value in told.items():
                asked.set_user_attr(name, value)
            # Before it is told: killed in between, a trial trains again, and leaves none either.
            for weights in WEIGHTS:
                shutil.rmtree(place / weights, ignore_errors=True)
            study.tell(asked, told.get("score"), state=ended)
    found = Search(tuple(_trials(study)), _searched(settings), folder)
    best = found.best
    write_json(folder / "trials.json", [asdict(trial) for trial in found.trials])
    lines = [f"  {name}: {best.settings[name]:.3g}" for name in SEARCHED]
    write_text(folder / "best.yaml", "\n".join(["ppo:", *lines, ""]))
    draw(found.trials, found.recipe, folder / "tuning.png")
    return found


def _train(turn: Turn, folder: Path, settings: PpoSettings, report: Progress) -> dict[str, Any]:
    """Train with these settings in the folder and return what the trial is judged by."""
    from rlhf_pipeline.stages import improve

    result = improve(turn, folder, settings, report)
    look = next(e for e in result.evaluations if e.update == result.chosen_update)
    if look.stopping_mean is None or not math.isfinite(look.stopping_mean):
        raise TrainingError("a trial is judged by the stopping reward, found none")
    return {"score": look.stopping_mean, "kl": look.kl, "chosen_update": result.chosen_update}


def _name_of(settings: PpoSettings) -> str:
    from rlhf_pipeline.ppo.state import decisive

    return hashed(*(f"{key}={value!r}" for key, value in decisive(settings)))[:16]


def _naming(number: int, report: Progress) -> Progress:
    """Return a Progress that says which trial its facts are about."""
    return lambda facts: report({"trial": number, **facts})


def _study(folder: Path, turn: Turn, settings: PpoSettings) -> optuna.Study:
    """Return the search kept in the folder, going on from what a killed one left."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    from rlhf_pipeline.ppo.state import decisive
    from rlhf_pipeline.reward.model import reward_version
    from rlhf_pipeline.reward.named import as_scored, written_versions

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Another snapshot, champion, baseline, reward or length is another search: scores would not
    # compare. With other settings of the machine, for which memory may be the reason, it goes on.
    reward, training = turn.settings.reward, turn.settings.training
    name = hashed(
        turn.fingerprint,
        str(turn.champion),
        str(turn.baseline),
        str(decisive(settings)),
        *(reward_version(turn.work / "reward" / job) for job in ("proxy", "stopping")),
        str((as_scored(reward.functions), reward.wish_bound)),
        *written_versions(reward.functions),
        str((training.watch_prompts, training.simulated_user)),
    )[:16]
    journal = folder / "journal.log"
    _end_with_a_line(journal)
    storage = JournalStorage(JournalFileBackend(str(journal)))
    study = optuna.create_study(
        storage=storage, study_name=name, direction="maximize", load_if_exists=True
    )
    if not study.trials:
        study.enqueue_trial(_searched(settings))
    waiting = [_wanted(t) for t in study.trials if t.state == optuna.trial.TrialState.WAITING]
    for trial in study.trials:
        if trial.state == optuna.trial.TrialState.RUNNING:
            # With a failure it had come to its end; with a part of its settings it had not begun,
            # and the next is asked for as it was. Else it waits before it is told to have failed:
            # killed in between, nothing would know of it any more.
            wanted = _wanted(trial)
            began = "failure" not in trial.user_attrs and wanted.keys() >= set(SEARCHED)
            if began and wanted not in waiting:
                study.enqueue_trial(wanted)
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    return study


def _end_with_a_line(journal: Path) -> None:
    """Cut off what a kill or a full disk left of a journal's last line, and let its lock go.

    Optuna would write on behind the half, and wait for whoever held the lock. Nobody does: the
    caller is alone in the folder.
    """
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    if not journal.exists():
        return
    with journal.open("r+b") as lines:
        lines.truncate(lines.read().rfind(b"\n") + 1)


def _searched(settings: PpoSettings) -> dict[str, float]:
    """Return the recipe's own settings, as it stands."""
    return {key: getattr(settings, key) for key in SEARCHED}


def _wanted(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    """Return the settings that a trial has, or is to have: it may be killed as it takes them up."""
    return {**trial.system_attrs.get("fixed_params", {}), **trial.params}


def _space(settings: PpoSettings) -> dict[str, Any]:
    from optuna.distributions import FloatDistribution, IntDistribution

    def around(middle: float) -> FloatDistribution:
        return FloatDistribution(middle / FACTOR, middle * FACTOR, log=True)

    clips, epochs = (*CLIP_RANGE, settings.clip_range), (*EPOCHS, settings.epochs)
    return {
        "learning_rate": around(settings.learning_rate),
        # From 0 there is no factor to go by.
        "kl_coef": around(settings.kl_coef) if settings.kl_coef else FloatDistribution(*KL_COEF),
        "clip_range": FloatDistribution(min(clips), max(clips), log=True),
        "epochs": IntDistribution(min(epochs), max(epochs)),
    }


def _trials(study: optuna.Study) -> list[Trial]:
    """Return the trials that came to an end; one that was killed is not among them."""
    found: list[Trial] = []
    for trial in study.trials:
        if trial.values is None and "failure" not in trial.user_attrs:
            continue
        about = trial.user_attrs
        found.append(
            Trial(
                number=len(found),
                settings={key: trial.params[key] for key in SEARCHED},
                score=trial.values[0] if trial.values else None,
                kl=about.get("kl"),
                chosen_update=about.get("chosen_update"),
                failure=about.get("failure"),
            )
        )
    return found


def draw(trials: Sequence[Trial], recipe: Mapping[str, float], path: Path) -> None:
    """Write score against each searched setting: a square is the recipe as it stands, a ring the
    best.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator

    figure: Any = Figure(figsize=(10, 3.2), layout="constrained")
    scored = [trial for trial in trials if trial.score is not None]
    best = max(scored, key=_score)
    for axis, name in zip(figure.subplots(1, len(SEARCHED), sharey=True), SEARCHED, strict=True):
        axis.scatter([t.settings[name] for t in scored], [t.score for t in scored], alpha=0.7)
        ring = {"markersize": 12, "fillstyle": "none", "markeredgewidth": 2}  # it may be the recipe
        ring |= {"color": "tab:green", "clip_on": False}  # the highest, it reaches over the edge
        axis.plot(best.settings[name], best.score, "o", label="best", **ring)
        for trial in scored:
            if trial.settings == recipe:
                axis.plot(trial.settings[name], trial.score, "s", color="k", label="recipe")
        if name == "epochs":
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        elif all(t.settings[name] > 0 for t in scored):
            axis.set_xscale("log")
            axis.minorticks_off()
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter("{x:g}")
            axis.tick_params("x", rotation=45, labelsize="small")
        axis.set_xlabel(name)
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("stopping reward")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))


def _score(trial: Trial) -> float:
    return -math.inf if trial.score is None else trial.score
