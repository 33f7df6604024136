"""From validated votes to what training reads: pairs, reward examples, SFT examples, prompts.

Splits go by the hash of the words that a conversation began with, so all its turns are in one split
for ever, however the data grows, and so is the same question in other capitals or punctuation.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeVar

from rlhf_pipeline.errors import FeedbackError
from rlhf_pipeline.files import new_file
from rlhf_pipeline.records import (
    EvaluationPrompt,
    FeedbackKind,
    Message,
    PreferencePair,
    Prompt,
    RewardExample,
    SftExample,
    Split,
    hashed,
    prompt_from_json,
)

if TYPE_CHECKING:
    import pandas as pd

Row = TypeVar("Row")
Record = TypeVar("Record", PreferencePair, RewardExample, SftExample, EvaluationPrompt)
Job = Literal["proxy", "stopping", "gate"]
JOBS: tuple[Job, ...] = ("proxy", "stopping", "gate")
PACKING = 4  # gzip's level: 6 takes two and a half times as long and leaves 95 % of the size
PACKED = ".gz"  # how the name of such a file ends
MOST_OF_NAME = 80  # characters of a cohort's
MOST_OF_GREETING = 12  # bytes: "good morning", or four Chinese characters
MOST_OF_PART = 200  # characters between spaces that are looked into for other ways to write them


@dataclasses.dataclass(frozen=True, slots=True)
class Datasets:
    """Everything one snapshot yields."""

    preference_pairs: tuple[PreferencePair, ...]
    reward_examples: tuple[RewardExample, ...]
    sft_examples: tuple[SftExample, ...]  # training prompts only
    evaluation_prompts: tuple[EvaluationPrompt, ...]


def unit_interval(*parts: str) -> float:
    """Return a number in [0, 1) that depends on the parts alone."""
    return int(hashed(*parts)[:15], 16) / 16**15


def opening_of(prompt: Prompt) -> Prompt:
    """Return how the prompt's conversation began, to the first thing its person said.

    Later turns hold it word for word: to learn from one is to have seen what the others are about.
    What is as short as a greeting counts only where nothing else was said.
    """
    place, _ = _first_said(prompt)
    return prompt[: place + 1]


def conversation_of(prompt: Prompt) -> str:
    """Return the hex digest of the words of `opening_of`: equal for prompts of one conversation.

    And for the same question in other capitals or punctuation, which tells no model more, or under
    another system message or after a greeting: the former may hold the day, or the person's name,
    and what was learnt of a question yesterday is known of it today. Where nothing but greetings
    were said, every letter counts, the system message's too: one draw for all who say hello would
    move a third of some shops' votes at once.
    """
    place, words = _first_said(prompt)
    if words:
        return hashed(f"user\x1e{words}")
    return hashed(*(f"{m.role}\x1e{_words(m.content) or m.content}" for m in prompt[: place + 1]))


def _first_said(prompt: Prompt) -> tuple[int, str]:
    """Return the place of the first thing its person said, and its words.

    Where nobody said more than a greeting the place of the first, and no words; the last message's
    where nobody said anything.
    """
    asked = [i for i, message in enumerate(prompt) if message.role == "user"]
    for place in asked:
        if words := _words(prompt[place].content):
            return place, words
    return min(asked, default=len(prompt) - 1), ""


class _OfWords(dict[int, int]):
    """Maps characters to themselves where words are made of them, any other to a space."""

    def __missing__(self, character: int) -> int:
        is_of_word = unicodedata.category(chr(character))[0] in "LMN"  # letters, marks, numbers
        return self.setdefault(character, character if is_of_word else ord(" "))


_OF_WORDS = _OfWords()


def _words(text: str) -> str:
    """Return the words of a text; none of one as short as a greeting."""
    spelt = text if text.isascii() else " ".join(map(_spelt, text.split()))
    words = " ".join(spelt.casefold().translate(_OF_WORDS).split())
    is_short = len(words.encode(errors="replace")) <= MOST_OF_GREETING
    return "" if is_short or not any(map(str.isalnum, words)) else words


def _spelt(part: str) -> str:
    # Time grows with the square of a run of accents: 100,000 in one text took 24 s.
    return unicodedata.normalize("NFKC", part) if len(part) <= MOST_OF_PART else part


def conversations_of(prompts: Iterable[Prompt]) -> list[int]:
    """Return which conversation each prompt is of, numbered in the order of their first."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(conversation_of(prompt), len(numbers)) for prompt in prompts]


def split_of(prompt: Prompt, evaluation_share: float) -> Split:
    """Return the split of a prompt's conversation."""
    held_out = unit_interval("split", conversation_of(prompt)) < evaluation_share
    return "evaluation" if held_out else "train"


def job_of(voter: str, shares: Mapping[Job, float]) -> Job:
    """Return which reward model learns from this voter: each voter serves exactly one.

    `shares` are the parts of the voters per job and sum to 1.
    """
    position = unit_interval("reward job", voter)
    for job in JOBS:
        position -= shares[job]
        if position < 0:
            return job
    return JOBS[-1]


def build(
    frame: pd.DataFrame,
    *,
    evaluation_share: float,
    min_rating: int,
    max_samples: int | None = None,
) -> Datasets:
    """Return the data sets of a validated snapshot frame.

    A completion is worth imitating when it is a correction, was rated at least `min_rating` (or the
    same on the 0-1 scale), or was chosen over another. `max_samples` keeps that many rows per data
    set, the same ones for the same data: those whose hash comes first. One prompt of each
    conversation comes before the others to evaluate with: they say the most about how sure it is.
    """
    pairs: list[PreferencePair] = []
    examples: list[RewardExample] = []
    imitate: dict[tuple[str, str], SftExample] = {}
    references: dict[str, list[str]] = {}
    prompts: dict[str, Prompt] = {}
    splits: dict[str, Split] = {}
    topics: dict[str, str] = {}
    cohorts: dict[str, str] = {}
    min_score = (min_rating - 1) / 4
    rows: Iterable[Any] = frame.itertuples(index=False)
    for row in rows:
        prompt_json = str(row.prompt)
        if prompt_json not in prompts:
            prompts[prompt_json] = prompt_from_json(prompt_json)
            splits[prompt_json] = split_of(prompts[prompt_json], evaluation_share)
        prompt, split = prompts[prompt_json], splits[prompt_json]
        if isinstance(topic := getattr(row, "topic", None), str):
            topics.setdefault(prompt_json, topic)  # the first to say so
        cohorts.setdefault(prompt_json, cohort_of(str(row.origin)))
        kind = FeedbackKind(row.kind)
        good: str | None = None
        if kind in (FeedbackKind.preference, FeedbackKind.correction):
            pair = _pair(row, kind, prompt, split)
            if pair is not None:
                pairs.append(pair)
                good = None if pair.tie else pair.chosen
        elif kind is not FeedbackKind.comment:
            number = None if row.number != row.number else float(row.number)  # NaN: not set
            examples.append(
                RewardExample(
                    example_id=row.feedback_id,
                    prompt=prompt,
                    completion=row.completion,
                    kind=kind,
                    number=number,
                    criteria=json.loads(row.criteria) if isinstance(row.criteria, str) else None,
                    voter=row.voter,
                    split=split,
                    origin=row.origin,
                )
            )
            rated = kind is FeedbackKind.rating and number is not None and number >= min_rating
            scored = kind is FeedbackKind.score and number is not None and number >= min_score
            good = row.completion if rated or scored else None
        if good is not None:
            if split == "train":
                imitate.setdefault((prompt_json, good), SftExample(prompt, good, kind.value))
            elif good not in references.setdefault(prompt_json, []):
                references[prompt_json].append(good)
    evaluation = [
        EvaluationPrompt(
            hashed(text)[:32],
            prompt,
            tuple(references.get(text, ())[:4]),
            topics.get(text),
            cohorts.get(text),
        )
        for text, prompt in prompts.items()
        if splits[text] == "evaluation"
    ]
    return Datasets(
        tuple(_capped(pairs, max_samples, lambda pair: pair.pair_id)),
        tuple(_capped(examples, max_samples, lambda example: example.example_id)),
        tuple(_capped(list(imitate.values()), max_samples, lambda e: hashed(e.completion))),
        tuple(
            conversations_first(
                sorted(evaluation, key=lambda p: p.prompt_id), lambda p: conversation_of(p.prompt)
            )
        ),
    )


def conversations_first(rows: Iterable[Row], of: Callable[[Row], str]) -> list[Row]:
    """Return the rows, the first of each conversation before the second of any, and so on.

    Turns of one conversation are no independent tries, and a comparison asks the first so many.
    """
    so_far: Counter[str] = Counter()
    turns: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        conversation = of(row)
        turns[so_far[conversation]].append(row)
        so_far[conversation] += 1
    return [row for turn in sorted(turns) for row in turns[turn]]


def newest(
    frame: pd.DataFrame, most: int | None, *, per_rater: int | None, unsigned: int | None
) -> pd.DataFrame:
    """Return the rows of a snapshot frame that were stored last, in their order.

    So many that `most` are within the caps: whoever sends more than counts drives nobody else's
    votes out. Of what `within_caps` then keeps of somebody's votes by their hash, new ones have
    their part however long people have voted.
    """
    if most is None or len(frame) <= most:
        return frame
    nobody, who, cap = _capped_together(frame, per_rater, unsigned)
    late = frame["seq"].rank(method="first", ascending=False)  # 1 for the newest
    counts = late.groupby([nobody, who]).rank() <= cap
    within = late.where(counts).rank() <= most
    return frame[(late <= most) | within].reset_index(drop=True)


def within_caps(
    frame: pd.DataFrame, *, per_rater: int | None, unsigned: int | None
) -> tuple[pd.DataFrame, Mapping[str, int]]:
    """Return a snapshot frame's rows within both caps, in their order, and what was left out.

    `per_rater` bounds the votes of each rater who is named; `unsigned` those without a rater that
    came in one way (their origin: a file, the API, a page), together, as nobody can say whether
    they are one person's. Those whose hash comes first are kept, so that nobody chooses which of
    their votes count. What was left out is {"signed": rows, "unsigned, ORIGIN": rows}, only where
    there is some.
    """
    nobody, who, most = _capped_together(frame, per_rater, unsigned)
    if not (frame.groupby([nobody, who])["feedback_id"].transform("size") > most).any():
        return frame, {}
    order = frame["feedback_id"].map(lambda key: unit_interval("rater cap", str(key)))
    over = order.groupby([nobody, who]).rank(method="first") > most
    names = ("unsigned, " + frame["origin"].map(str)).where(nobody, "signed")
    left_out = {str(name): int(n) for name, n in names[over].value_counts().sort_index().items()}
    return frame[~over].reset_index(drop=True), left_out


def _capped_together(
    frame: pd.DataFrame, per_rater: int | None, unsigned: int | None
) -> tuple[pd.Series[bool], pd.Series[str], pd.Series[float]]:
    """Return of each row if nobody signed it, whose or what way's cap it is under, and the cap."""
    nobody = frame["rater_id"].isna()
    who = frame["voter"].where(~nobody, frame["origin"])
    most = nobody.map({False: per_rater, True: unsigned}).astype(float).fillna(float("inf"))
    return nobody, who, most


def cohort_of(origin: str) -> str:
    """Return which cohort a vote's rater is of: where votes come in; a file by its name alone."""
    return PurePath(origin).name[:MOST_OF_NAME] or origin[:MOST_OF_NAME]


def _pair(row: Any, kind: FeedbackKind, prompt: Prompt, split: Split) -> PreferencePair | None:
    """Return the row's pair: a correction beats the original, a preference says which it is."""
    if kind is FeedbackKind.correction:
        chosen, rejected, choice = row.text, row.completion, "correction"
    else:
        left, right = row.completion, row.other_completion
        if row.shown_first == "other":
            left, right = right, left
        choice = row.choice
        chosen, rejected = (right, left) if choice == "right" else (left, right)
    return PreferencePair(
        pair_id=row.feedback_id,
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        voter=row.voter,
        origin=row.origin,
        split=split,
        tie=choice in ("tie", "both_bad"),
        both_bad=choice == "both_bad",
        corrected=choice == "correction",
    )


def _capped(records: list[Any], most: int | None, key: Any) -> list[Any]:
    if most is None or len(records) <= most:
        return records
    kept = set(
        sorted(range(len(records)), key=lambda i: unit_interval("cap", key(records[i])))[:most]
    )
    return [record for i, record in enumerate(records) if i in kept]


def write_jsonl(path: Path, records: Iterable[Record]) -> int:
    """Write one JSON object a line, whole or not at all, and return how many."""
    count = 0
    with new_file(path) as aside, writing(aside, path) as file:
        for record in records:
            file.write(line_of(record))
            count += 1
    return count


def line_of(record: Record) -> str:
    """Return the record as its line in a file, with the line's end."""
    return json.dumps(dataclasses.asdict(record), ensure_ascii=False) + "\n"


@contextmanager
def writing(aside: Path, path: Path) -> Iterator[TextIO]:
    """Yield the file `aside` to write what shall lie at `path`: packed where that name says so.

    The same lines are the same bytes, whenever they are written.
    """
    if path.suffix != PACKED:
        with aside.open("w", encoding="utf-8") as lines:
            yield lines
        return
    with (
        aside.open("wb") as file,
        gzip.GzipFile("", "wb", PACKING, file, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="utf-8") as lines,
    ):
        yield lines


def reading(path: Path) -> TextIO:
    """Return a data set's file open for reading, packed or plain as its name says."""
    if path.suffix == PACKED:
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8")
    return path.open(encoding="utf-8")


def names_of(path: Path) -> tuple[Path, ...]:
    """Return where a data set may lie: at `path`, or plain, where older releases wrote it."""
    return (path, path.with_suffix("")) if path.suffix == PACKED else (path,)


def place_of(path: Path) -> Path:
    """Return where a data set lies, `path` where it is not there at all."""
    return next((name for name in names_of(path) if name.exists()), path)


def read_jsonl(path: Path, kind: type[Record]) -> list[Record]:
    """Return the records that `write_jsonl` wrote.

    Raises FeedbackError when the file is not there: the stage that writes it has not run.
    """
    path = place_of(path)
    if not path.exists():
        raise FeedbackError(f"needed {path}, found nothing; run the stage that writes it first")
    records = []
    with reading(path) as file:
        for line in file:
            values = json.loads(line)
            values["prompt"] = tuple(Message(**message) for message in values["prompt"])
            if "references" in values:
                values["references"] = tuple(values["references"])
            if "kind" in values:
                values["kind"] = FeedbackKind(values["kind"])
            records.append(kind(**values))
    return records
