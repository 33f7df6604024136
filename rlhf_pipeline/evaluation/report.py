"""What a comparison found: numbers, paired differences, samples; as JSON, markdown and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rlhf_pipeline.errors import EvaluationError
from rlhf_pipeline.evaluation.behaviour import ItemResult, worse_at
from rlhf_pipeline.evaluation.metrics import Number, repetition_change
from rlhf_pipeline.evaluation.pair_judge import Judged
from rlhf_pipeline.evaluation.phrases import Phrase
from rlhf_pipeline.evaluation.pieces import RewardPieces
from rlhf_pipeline.records import Prompt

Against = Literal["baseline", "champion"]

GATE_SCORE = "gate_score"
KL = "kl_to_baseline"
APART = "_disagreement"  # after a reward model's job: deviation among its heads, in units of score

MEANING = {
    GATE_SCORE: "score of the gate's reward model, which nothing was trained or chosen by",
    "proxy_score": "score of the reward model that training maximised",
    "stopping_score": "score of the reward model that chose the checkpoint",
    f"proxy{APART}": "deviation among the heads of the model that training maximised",
    f"gate{APART}": "deviation among the heads of the gate's reward model",
    "empathy": "of three kinds of phrases (reacts, has understood, asks), the share that is there",
    "item_ratio": "share of the words that name items, of evaluation.titles or any Title (1999)",
    "length_tokens": "tokens per completion, the end token among them",
    "distinct_1": "distinct words over all words",
    "distinct_2": "distinct word pairs over all word pairs",
    "repetition": "share of a completion's 4-grams that it had said before",
    "truncation_rate": "share of completions cut off at the token limit",
    "bleu_1": "single words shared with the references, of the prompts that have some",
    "bleu_2": "words and word pairs shared with the references, likewise",
    "rouge_l": "F1 of the longest common word sequence with the nearest reference, likewise",
    "perplexity": "of the prompts' reference completions",
    "seconds_per_completion": "of wall time, in the batches of this comparison",
    "memory_mib": "most on the GPU, or what the process held, as it answered",
    KL: "nats per completion, estimated on the system's own completions",
    "win rate": "share of prompts, ties half; the change is from one half, the interval the rate's",
    "win rate, length-controlled": "the same, were both answers equally long",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt and what each system answered, with the gate's score."""

    prompt_id: str
    prompt: list[list[str]]  # [role, content] per message
    completions: dict[str, str]
    scores: dict[str, float]
    pieces: dict[str, dict[str, float]] = field(default_factory=dict)  # what each function added


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table of numbers, as a person reads it."""

    name: str
    other: str
    here: str
    change: str
    percent: str
    interval: str


@dataclass(frozen=True, slots=True)
class GroupResult:
    """Candidate against champion on the prompts of one topic or cohort."""

    win_rate: Number
    difference: Number  # of the gate's score
    others: dict[str, Number] = field(default_factory=dict)  # of every other mean over prompts

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> GroupResult:
        """Return what `asdict` gave."""
        others = _numbers(value.get("others", {}))
        return cls(Number(**value["win_rate"]), Number(**value["difference"]), others)


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Candidate against baseline and champion on the same prompts. Where the champion is the
    baseline, both columns hold the same numbers.
    """

    prompts: int
    seed: int
    temperature: float
    champion_is_baseline: bool
    numbers: dict[str, dict[str, Number]]  # system -> metric
    differences: dict[str, dict[str, Number]]  # against -> metric: candidate minus the other
    win_rates: dict[str, Number]  # against
    length_controlled_win_rates: dict[str, Number]  # against
    scores: dict[str, list[float]]  # system -> the gate's score per prompt
    samples: list[Sample]
    seconds: float
    reward: RewardPieces | None = None  # where the recipe names reward functions
    topics: dict[str, GroupResult] = field(default_factory=dict)
    cohorts: dict[str, GroupResult] = field(default_factory=dict)  # of who voted on the prompts
    judge: dict[str, Number] = field(default_factory=dict)  # the gate model's accuracy, by group
    behaviour: list[ItemResult] = field(default_factory=list)
    judged: dict[str, Judged] = field(default_factory=dict)  # against; where a judge was asked
    phrases: dict[str, list[Phrase]] = field(default_factory=dict)  # against
    conversations: int | None = None  # that the prompts are of; earlier releases did not count

    @property
    def others(self) -> list[Against]:
        """Return what the candidate is compared with, each once."""
        return ["baseline"] if self.champion_is_baseline else ["baseline", "champion"]

    def metrics(self) -> dict[str, float]:
        """Return every number by a flat name: what the gate reads and MLflow shows.

        `prompts` (how many were compared), `conversations` (that they are of),
        `candidate/gate_score`, `vs_champion/gate_score_low`, `vs_champion/win_rate`, ... and, per
        other system, `length_ratio`, `distinct_2_change` and `perplexity_change` (relative),
        `repetition_change` (below 0.02 counts as that), `truncation_beyond` (the candidate's rate
        where it surely exceeds the other's, else 0), `behaviour_worse` (behaviour items, and kinds
        of them, that it fails more often). What was not measured is not there.
        """
        flat = {"prompts": float(self.prompts)}
        if self.conversations is not None:
            flat["conversations"] = float(self.conversations)
        for system, numbers in self.numbers.items():
            for metric, number in numbers.items():
                _spread(flat, f"{system}/{metric}", number)
        for against in self.differences:
            there = f"vs_{against}"
            for metric, number in self.differences[against].items():
                _spread(flat, f"{there}/{metric}", number)
            _spread(flat, f"{there}/win_rate", self.win_rates[against])
            controlled = self.length_controlled_win_rates[against]
            _spread(flat, f"{there}/length_controlled_win_rate", controlled)
            if (told := self.judged.get(against)) is not None:
                _spread(flat, f"{there}/judge_win_rate", told.win_rate)
                flat[f"{there}/judge_consistent"] = told.consistent
            flat |= {f"{there}/{key}": value for key, value in self._relations(against).items()}
        if self.reward is not None:
            for name, number in self.reward.metrics():
                _spread(flat, name, number)
        return flat

    def _relations(self, against: str) -> dict[str, float]:
        here, other = self.numbers["candidate"], self.numbers[against]
        found: dict[str, float] = {}
        if other["length_tokens"].value > 0:
            found["length_ratio"] = here["length_tokens"].value / other["length_tokens"].value
        for metric in ("distinct_2", "perplexity"):
            if metric in here and metric in other and other[metric].value > 0:
                found[f"{metric}_change"] = here[metric].value / other[metric].value - 1
        if "distinct_2" in here and "distinct_2" in other and other["distinct_2"].value == 0:
            found["distinct_2_change"] = 0.0  # single words: there is nothing to lose
        repeated = here["repetition"].value, other["repetition"].value
        found["repetition_change"] = repetition_change(*repeated)
        if self.behaviour:
            found["behaviour_worse"] = float(len(worse_at(self.behaviour, against)))
        rate = here["truncation_rate"].value
        more = self.differences[against].get("truncation_rate")
        least = rate - other["truncation_rate"].value if more is None else more.low
        found["truncation_beyond"] = rate if least is None or least > 0 else 0.0
        return found

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; `from_json` takes them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EvaluationReport:
        """Return the report that `to_json` gave; raise EvaluationError of a newer release's."""
        try:
            return cls._from_json(value)
        except TypeError as error:  # a field that this release does not know
            raise EvaluationError(
                f"needed an evaluation that this release or an older one wrote, found: {error}; "
                "install the release that wrote it"
            ) from error

    @classmethod
    def _from_json(cls, value: Mapping[str, Any]) -> EvaluationReport:
        fields = dict(value)
        for name in ("numbers", "differences"):
            fields[name] = {k: _numbers(v) for k, v in fields[name].items()}
        for name in ("win_rates", "length_controlled_win_rates"):
            fields[name] = _numbers(fields[name])
        fields["samples"] = [Sample(**sample) for sample in fields["samples"]]
        if fields.get("reward") is not None:
            fields["reward"] = RewardPieces.from_json(fields["reward"])
        for name in ("topics", "cohorts"):
            groups = fields.get(name, {})
            fields[name] = {group: GroupResult.from_json(of) for group, of in groups.items()}
        fields["judge"] = _numbers(fields.get("judge", {}))
        fields["judged"] = {
            against: Judged(**{**told, "win_rate": Number(**told["win_rate"])})
            for against, told in fields.get("judged", {}).items()
        }
        fields["phrases"] = {
            against: [Phrase(**phrase) for phrase in some]
            for against, some in fields.get("phrases", {}).items()
        }
        fields["behaviour"] = [ItemResult(**result) for result in fields["behaviour"]]
        return cls(**fields)

    def to_markdown(self) -> str:
        """Return the tables a person reads, then the completions side by side."""
        parts = [f"{self.prompts} held-out prompts, temperature {self.temperature:g}."]
        parts += [self._table("baseline")]
        if not self.champion_is_baseline:
            parts += [self._table("champion")]
        for against in self.others:
            if rows := [(quoted(words), *shares) for words, *shares in self.phrase_rows(against)]:
                title = f"### {PHRASES} than the {against}"
                parts += [_markdown(("words", against, "candidate"), rows, title)]
        parts += [quoted(words) for words in self.judge_words()]
        if self.reward is not None:
            parts += [self.reward.to_markdown()]
        for word, groups in (("topic", self.topics), ("cohort", self.cohorts)):
            if rows := [(quoted(name), *numbers) for name, *numbers in group_rows(groups)]:
                head = (word, *GROUP_HEAD)
                parts += [_markdown(head, rows, f"### By {word}, against the champion")]
        if rows := [(quoted(name), *numbers) for name, *numbers in self.judge_rows()]:
            parts += [_markdown(JUDGE_HEAD, rows, "### The gate's reward model, by group")]
        if self.behaviour:
            worse = worse_at(self.behaviour, "champion")
            parts += [
                f"### Behaviour\n\nWorse than the champion at {len(worse)} of "
                f"{len(self.behaviour)} items{': ' if worse else '.'}{quoted('; '.join(worse))}"
            ]
        parts += ["### Side by side", *(_sample_to_markdown(s) for s in self.samples)]
        return "\n\n".join(parts) + "\n"

    def rows(self, against: Against) -> list[Row]:
        """Return the numbers beside those of another system, changes and intervals with them."""
        found = []
        for metric, here in self.numbers["candidate"].items():
            other = self.numbers[against].get(metric)
            if other is None:
                continue
            change = here.value - other.value
            # A score has no zero of its own, so a share of one says nothing.
            shares = other.value and not metric.endswith("_score")
            percent = f"{100 * change / abs(other.value):+.1f} %" if shares else "–"
            interval = _interval(self.differences[against].get(metric), "+.3f")
            row = (f"{other.value:.3f}", f"{here.value:.3f}", f"{change:+.3f}", percent, interval)
            found.append(Row(metric, *row))
        rates = {
            "win rate": self.win_rates[against],
            "win rate, length-controlled": self.length_controlled_win_rates[against],
        }
        if (told := self.judged.get(against)) is not None:
            rates[f"win rate, by {told.model}"] = told.win_rate
        for name, rate in rates.items():
            won, lost = f"{rate.value:.3f}", f"{1 - rate.value:.3f}"
            beyond, interval = f"{rate.value - 0.5:+.3f}", _interval(rate, ".3f")
            found.append(Row(name, lost, won, beyond, "", interval))
        return found

    def table(self) -> list[dict[str, str]]:
        """Return the rows against every other system as records of one form, for MLflow."""
        return [{"against": a, **asdict(row)} for a in self.others for row in self.rows(a)]

    def group_table(self) -> list[dict[str, str]]:
        """Return what changed in each topic and cohort as records of one form, for MLflow."""
        return [
            {
                "group": f"{word} {name}",
                "metric": metric,
                "change": f"{number.value:+.3f}",
                "interval": _interval(number, "+.3f"),
                "prompts": str(number.n),
            }
            for word, groups in (("topic", self.topics), ("cohort", self.cohorts))
            for name, found in groups.items()
            for metric, number in {"score": found.difference, **found.others}.items()
        ]

    def phrase_rows(self, against: Against) -> list[tuple[str, str, str]]:
        """Return words, and the shares of the other's and the candidate's answers with them."""
        told = self.phrases.get(against, [])
        return [(p.words, f"{p.other:.0%}", f"{p.here:.0%}") for p in told]

    def phrase_table(self) -> list[dict[str, str]]:
        """Return them against every other system as records of one form, for MLflow."""
        return [
            {"against": against, "words": words, "other": other, "candidate": here}
            for against in self.others
            for words, other, here in self.phrase_rows(against)
        ]

    def judge_words(self) -> list[str]:
        """Return what has to be known of a judge's win rates; nothing where none was asked."""
        return [
            f"{told.model} was asked in both orders about {told.win_rate.n} pairs with the "
            f"{against}: in {told.consistent:.0%} of them the order changed nothing, elsewhere it "
            f"is a tie; {told.unanswered} more had no verdict."
            for against in self.others
            if (told := self.judged.get(against)) is not None
        ]

    def judge_rows(self) -> list[tuple[str, ...]]:
        """Return group, held-out pairs, accuracy and its interval, the worst first."""
        ordered = sorted(self.judge.items(), key=lambda item: item[1].value)
        return [(g, str(n.n), f"{n.value:.3f}", _interval(n, ".3f")) for g, n in ordered]

    def _table(self, against: Against) -> str:
        head = ("metric", against, "candidate", "change", "change %", "95 % interval")
        rows = [
            (r.name.replace("|", "\\|"), r.other, r.here, r.change, r.percent, r.interval)
            for r in self.rows(against)
        ]
        return _markdown(head, rows, f"### Candidate against {against}")


PHRASES = "What the candidate says more often, and less"
GROUP_HEAD = ("prompts", "win rate", "score change", "95 % interval", "what else surely changed")
JUDGE_HEAD = ("group", "held-out pairs", "accuracy", "95 % interval")


def group_rows(groups: Mapping[str, GroupResult]) -> list[tuple[str, ...]]:
    """Return name, prompts, win rate, score change and its interval of each group.

    Last stands what else has an interval off 0; one in twenty has where nothing changed.
    """
    return [
        (
            name,
            str(found.win_rate.n),
            f"{found.win_rate.value:.3f}",
            f"{found.difference.value:+.3f}",
            _interval(found.difference, "+.3f"),
            "; ".join(
                f"{metric} {number.value:+.3f} ({_interval(number, '+.3f')})"
                for metric, number in found.others.items()
                if number.low is not None
                and number.high is not None
                and (number.low > 0 or number.high < 0)
            )
            or "–",
        )
        for name, found in groups.items()
    ]


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return title + "\n\n" + "\n".join(lines)


def _spread(flat: dict[str, float], name: str, number: Number) -> None:
    flat[name] = number.value
    if number.low is not None and number.high is not None:
        flat[f"{name}_low"], flat[f"{name}_high"] = number.low, number.high


def _numbers(value: Mapping[str, Any]) -> dict[str, Number]:
    return {key: Number(**number) for key, number in value.items()}


def _interval(number: Number | None, style: str) -> str:
    if number is None or number.low is None or number.high is None:
        return "–"
    return f"{number.low:{style}} to {number.high:{style}}"


def _sample_to_markdown(sample: Sample) -> str:
    lines = [f"> **{role}:** {quoted(content)}" for role, content in sample.prompt]
    rows = [
        f"- **{system}** ({_told(sample, system)}): {quoted(text)}"
        for system, text in sample.completions.items()
    ]
    return "\n>\n".join(lines) + "\n\n" + "\n".join(rows)


def _told(sample: Sample, system: str) -> str:
    pieces = sample.pieces.get(system, {})
    added = ", ".join(f"{name} {number:+.2f}" for name, number in pieces.items())
    return f"{sample.scores[system]:.2f}" + (f"; reward: {added}" if added else "")


def quoted(text: str) -> str:
    """Return text that cannot break out of its line or act as HTML or markdown."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    for sign in ("\\", "`", "*", "_", "[", "]", "|", "!", "#"):
        plain = plain.replace(sign, f"\\{sign}")
    return plain


def prompt_to_rows(prompt: Prompt) -> list[list[str]]:
    """Return a prompt as `Sample` keeps it."""
    return [[message.role, message.content] for message in prompt]
