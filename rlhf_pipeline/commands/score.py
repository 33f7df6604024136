"""`rlhf score`: completions in a file scored by any rewards, gone on with after an interruption."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_pipeline.commands.common import UNFIT, lines_there, numbered_lines, progress, prompt_in
from rlhf_pipeline.config import reward_functions
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.records import (
    Progress,
    RewardFunction,
    RewardInput,
    as_messages,
    hashed,
    prompt_to_json,
)
from rlhf_pipeline.reward.composite import Breakdown, CompositeReward, Term
from rlhf_pipeline.reward.functions import CheckedReward, as_reward
from rlhf_pipeline.reward.named import composite_of, named_reward
from rlhf_pipeline.reward.settings import CRITERION, LEARNED, FunctionSettings

if TYPE_CHECKING:
    from rlhf_pipeline.ppo.breakdown import CriticBreakdown, TrainedCritic

BLOCK = 64  # completions scored together, and lost at most when the process dies


def score(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="JSON lines of prompt (or messages), completion, references."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The file to write, or to go on with.")],
    reward: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=WEIGHT]",
            help="distinct-1, distinct-2, length, repetition, rouge-l, bleu, empathy, "
            "recommendation, item-ratio, safety, a reward model's folder, https://… or "
            "module:function; several are summed by weight. An address with a ?query is taken "
            "whole: its weight goes into a --preset file.",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.yaml",
            help="Instead: functions as a recipe names them, with options; a preset, or a file of "
            "functions by name.",
        ),
    ] = None,
    learned: Annotated[
        Path | None, typer.Option(help="A reward model's folder: the preset's `learned`.")
    ] = None,
    critic: Annotated[
        Path | None,
        typer.Option(
            help="A PPO run's folder: its critic's value and criteria beside every score."
        ),
    ] = None,
) -> None:
    """Score a file of completions: a line out per line in, with what each reward gave it.

    With --critic also what a trained critic expected, before and at the end of the completion.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    items = read_items(file)
    composite = composite_for(reward or [], preset, learned)
    expects = None
    if critic is not None:
        from rlhf_pipeline.ppo.breakdown import load_critic

        expects = load_critic(critic)
    columns = (TextColumn("scores"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress(*columns) as bar:
        task = bar.add_task("scores", total=len(items))
        before = score_all(
            composite,
            items,
            out,
            critic=expects,
            report=lambda facts: bar.update(task, completed=int(facts["scores"])),
        )
    again = f", {before} of them were there before" if before else ""
    typer.echo(f"{len(items)} scores in {out}{again}")


def composite_for(
    names: Sequence[str], preset: str | None, learned: Path | None
) -> CompositeReward:
    """Return the composite of the named rewards, or of a preset; raises ConfigError for both."""
    if bool(names) == (preset is not None):
        raise ConfigError(
            "needed --reward, once or more, or --preset, found "
            f"{'both' if names else 'neither'}; give one of them"
        )
    if preset is None:
        if learned is not None:
            raise ConfigError(
                f"--learned is what a preset's {LEARNED} means, found it with --reward; name the "
                f"folder as a reward: --reward {learned}"
            )
        return CompositeReward(weighted_terms(names))
    functions = dict(reward_functions(preset, Path.cwd()))
    targets = [one.function or name for name, one in functions.items()]
    asks = any(target == LEARNED or target.startswith(CRITERION) for target in targets)
    if asks != (learned is not None):
        raise ConfigError(
            f"{LEARNED} and --learned come together: the preset {preset} names "
            f"{', '.join(functions)}, found --learned {learned}; give or leave out both"
        )
    by_votes = CheckedReward(lambda items: [], LEARNED) if learned is None else as_reward(learned)
    composite = composite_of({LEARNED: FunctionSettings(weight=0), **functions}, by_votes)
    assert isinstance(composite, CompositeReward)  # as it is wherever functions are named
    return composite


def weighted_terms(names: Sequence[str]) -> dict[str, Term]:
    """Return the terms that `NAME` or `NAME=WEIGHT` ask for; raises ConfigError for one twice.

    An address with a query is a name to its end, whatever stands behind its last `=`.
    """
    terms: dict[str, Term] = {}
    for asked in names:
        name, weight = _name_and_weight(asked)
        if name in terms:
            raise ConfigError(f"needed each reward once, found {name} twice; leave one out")
        terms[name] = Term(named_reward(name), weight)
    return terms


def _name_and_weight(asked: str) -> tuple[str, float]:
    name, equals, number = asked.rpartition("=")
    if "?" in name and name.startswith(("http://", "https://")):
        return asked, 1.0  # what the query says last may be a number too
    try:
        return (name, float(number)) if equals else (asked, 1.0)
    except ValueError:
        return asked, 1.0


def read_items(path: Path) -> list[RewardInput]:
    """Return the file's completions with their prompts; blank lines are left out.

    Raises ConfigError where there is no such file or a line is not one.
    """
    lines = numbered_lines(path, "JSON lines", "completions")
    return [_item(line, path, number) for number, line in lines]


def _item(line: str, path: Path, number: int) -> RewardInput:
    try:
        values = json.loads(line)
        prompt, completion = prompt_in(values), values["completion"]
        references = values.get("references") or []
        texts = [completion, *references]
        for text in texts:
            text.encode()  # as prompt_in does
    except UNFIT as error:
        raise _no_item(line, path, number) from error
    if not isinstance(references, list) or not all(isinstance(text, str) for text in texts):
        raise _no_item(line, path, number)
    return RewardInput(prompt, completion, tuple(references))


def _no_item(line: str, path: Path, number: int) -> ConfigError:
    return ConfigError(
        f'{path}:{number} needs {{"prompt": text or messages, "completion": text}} and references, '
        f"if any, as a list of texts; found {line[:60]!r}; mend it"
    )


def score_all(
    reward: CompositeReward,
    items: Sequence[RewardInput],
    out: Path,
    *,
    report: Progress,
    critic: TrainedCritic | None,
) -> int:
    """Append a line per item that has none in `out` yet; return how many were there before.

    Raises ConfigError where `out` holds another reward's scores or those of other completions.
    """
    version = reward.version if critic is None else hashed(reward.version, critic.version)
    there = lines_there(
        out,
        [(_identity(item), version) for item in items],
        lambda told: (told["item"], told["reward_version"]),
        "scores of the same completions by the same rewards and weights",
    )
    report({"scores": there})
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        for start in range(there, len(items), BLOCK):
            block = items[start : start + BLOCK]
            judged = reward.judge(block)
            critics: Sequence[CriticBreakdown | None]
            critics = [None] * len(block) if critic is None else critic(block)
            for i, (item, told, said) in enumerate(zip(block, judged, critics, strict=True), start):
                line = dict(_line(i, item, told, version, reward))
                if said is not None:
                    line["critic"] = asdict(said)
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            report({"scores": start + len(block)})
    return there


def _line(
    i: int, item: RewardInput, told: Breakdown, version: str, reward: CompositeReward
) -> Mapping[str, Any]:
    return {
        "number": i + 1,
        "prompt": as_messages(item.prompt),
        "completion": item.completion,
        "score": told.score,
        "pieces": {
            name: {"score": piece.score, "added": piece.added}
            | ({"skipped": True} if piece.skipped else {})
            | _zero_to_one(reward.terms[name].reward, piece.score)
            for name, piece in told.pieces.items()
        },
        "reward_version": version,
        "item": _identity(item),
    }


def _zero_to_one(reward: RewardFunction, score: float) -> dict[str, float]:
    """Return a learned reward's score from 0 to 1 as well; of what is on no such scale, nothing."""
    told = getattr(reward, "from_zero_to_one", None)
    return {} if told is None else {"zero_to_one": told([score])[0]}


def _identity(item: RewardInput) -> str:
    return hashed(prompt_to_json(item.prompt), item.completion, *item.references)
