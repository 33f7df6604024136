"""Has the feedback changed since the last turn? Evidently compares feature by feature, by PSI.

The population stability index of two samples is the sum over bins of (p - q) ln(p / q); a number's
bins are the reference's deciles. Where nothing changed it is about (1/n + 1/m) times a chi-squared
variable with bins - 1 degrees of freedom (B. Yurdakul, "Statistical Properties of Population
Stability Index", 2018), so a few hundred rows cross a fixed 0.2 by chance. A feature has drifted
where its PSI is above both the threshold and what chance gives once in a thousand times.

The votes since the last turn are compared with the newest that it had, not with themselves and all
those again: beside a long history nothing new would be seen, and what once had changed for good
would be called a change turn after turn. One side may be a handful of votes, where a bin that is
empty by chance weighs much; so bins are as wide as the smaller side needs.

Where those votes had drifted themselves, what is like the ones they were compared with is no drift
either: after a night of another crowd the return to what was there before would be called one too.

What a version's answers move (their lengths, what people think of them) is compared among votes on
one version, the one that both sides have most of. A better champion is liked better, and where two
answer side by side one may have more of the new votes than before; neither alone is drift.

What this does not see: a change of meaning at the same lengths, words and ratings. Rows that depend
on each other (one person's thousand votes) make chance look smaller than it is.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_pipeline.errors import ValidationFailed
from rlhf_pipeline.files import write_text
from rlhf_pipeline.records import ELSEWHERE, prompt_from_json
from rlhf_pipeline.topics import inert_topics

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 100_000  # of each side that are compared
CHANCE = 0.001  # how often chance alone may call a feature drifted
BINS = 10  # of a number: the reference's deciles; fewer where rows are few
FEWEST_BEFORE = 1000  # votes of the last turn that even one new vote is compared with
# Expected on the smaller side, were both alike, so that none is empty by chance.
FEWEST_PER_BIN = 15
WORD_BUCKETS = 16  # of prompts by their longest word: a topic of sorts, in any language
OTHERS = "(others)"

NUMBERS = (
    *("prompt_characters", "completion_characters", "correction_characters"),
    *("prompt_digit_share", "score"),
)
WORDS = ("kind", "thumbs", "rating", "source", "signed", "topic", "word_bucket", "prompt_asks")
FEATURES = (*NUMBERS, *WORDS)
OF_ANSWERS = ["completion_characters", "correction_characters", "score", "thumbs", "rating"]


@dataclass(frozen=True, slots=True)
class FeatureDrift:
    """One feature: its PSI, and above what it counts as drift."""

    psi: float
    threshold: float
    drifted: bool


@dataclass(frozen=True, slots=True)
class DriftReport:
    """What changed between two frames of votes; any drifted feature makes the whole drifted."""

    features: Mapping[str, FeatureDrift]  # those of which both sides have values, and enough
    html_path: str

    @property
    def drifted(self) -> bool:
        """Whether any feature drifted."""
        return any(feature.drifted for feature in self.features.values())

    @property
    def psi(self) -> dict[str, float]:
        """Each compared feature's PSI."""
        return {name: feature.psi for name, feature in self.features.items()}


def feedback_drift(
    current: pd.DataFrame,
    reference: pd.DataFrame,
    *,
    earlier: pd.DataFrame | None = None,
    threshold_psi: float = 0.2,
    html_path: str | Path,
) -> DriftReport:
    """Compare two frames of votes and write Evidently's page.

    `current` are votes that the last turn had not, `reference` its newest (`newest_of`); both are
    sampled down to MOST_ROWS rows. `earlier` are those that the reference was compared with, where
    it had drifted: a feature that drifted from the reference and not from them is told as beside
    them. The page is of current and reference and needs no network. Raises ValidationFailed where a
    side has no rows.
    """
    html_path = Path(html_path)
    if not len(current) or not len(reference):
        raise ValidationFailed(
            f"drift needs rows on both sides, found {len(current)} and {len(reference)}; "
            "compare snapshots that hold feedback"
        )
    features, snapshot, topics = _compared(current, reference, threshold_psi)
    if earlier is not None and len(earlier) and any(f.drifted for f in features.values()):
        then, *_ = _compared(current, earlier, threshold_psi)
        back = {name: feature for name, feature in then.items() if not feature.drifted}
        features = {
            name: back.get(name, feature) if feature.drifted else feature
            for name, feature in features.items()
        }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        page = snapshot.get_html_str(as_iframe=False)
    write_text(html_path, inert_topics(page, topics))
    return DriftReport(features=features, html_path=str(html_path))


def newest_of(frame: pd.DataFrame, new: int) -> pd.DataFrame:
    """Return the last turn's newest votes: as many as are new, FEWEST_BEFORE at least."""
    return frame.nlargest(max(new, FEWEST_BEFORE), "seq")


def _compared(
    current: pd.DataFrame, reference: pd.DataFrame, threshold_psi: float
) -> tuple[dict[str, FeatureDrift], Any, list[str]]:
    """Return each compared feature's drift, Evidently's snapshot and the topics that are in it."""
    import pandas as pd

    sides = _sampled(current), _sampled(reference)
    on = [side["model_version"].fillna(ELSEWHERE) for side in sides]
    # Where both sides have no version in common one is left without votes, and is not compared.
    version = on[0].value_counts().combine(on[1].value_counts(), min, fill_value=0).idxmax()
    now, before = (_features(side) for side in sides)
    for side, versions in zip((now, before), on, strict=True):
        side.loc[versions != version, OF_ANSWERS] = None
    now, before = _binned(now, before)
    compared = [name for name in FEATURES if _tells(now[name], before[name])]
    thresholds = {name: _threshold(now, before, name, threshold_psi) for name in compared}
    snapshot = _compare(now[compared], before[compared], thresholds)
    document = json.loads(snapshot.json())
    if len(document["tests"]) != len(compared):
        raise ValidationFailed(
            f"needed {len(compared)} drift tests from Evidently, found {len(document['tests'])}; "
            "without tests its report passes whatever it saw"
        )
    values = {m["config"]["column"]: float(m["value"]) for m in document["metrics"]}
    failed = {
        test["metric_config"]["params"]["column"]
        for test in document["tests"]
        if test["status"] != "SUCCESS"
    }
    topics = pd.concat([now["topic"], before["topic"]]).dropna().unique()
    features = {
        name: FeatureDrift(values[name], thresholds[name], name in failed) for name in compared
    }
    return features, snapshot, list(topics)


def _sampled(frame: pd.DataFrame) -> pd.DataFrame:
    if len(frame) <= MOST_ROWS:
        return frame.reset_index(drop=True)
    return frame.sample(MOST_ROWS, random_state=0).reset_index(drop=True)


def _features(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one column per feature, missing where it does not apply."""
    import pandas as pd

    prompts = {text: _prompt_features(text) for text in frame["prompt"].dropna().unique()}
    prompt = pd.DataFrame(
        [prompts.get(text, (None, None, None, None)) for text in frame["prompt"]],
        columns=["prompt_characters", "prompt_digit_share", "prompt_asks", "word_bucket"],
        index=frame.index,
    )
    number = frame["number"].astype(float)
    features = prompt.assign(
        completion_characters=frame["completion"].str.len(),
        correction_characters=frame["text"].str.len().where(frame["kind"] == "correction"),
        rating=number.map({float(n): str(n) for n in range(1, 6)}).where(frame["kind"] == "rating"),
        score=number.where(frame["kind"] == "score"),
        thumbs=number.map({1.0: "up", 0.0: "down"}).where(frame["kind"] == "thumbs"),
        kind=frame["kind"],
        source=frame["source"],
        signed=frame["rater_id"].notna().map({True: "yes", False: "no"}),
        topic=frame["topic"],
    )
    for name in NUMBERS:
        features[name] = features[name].astype(float)
    for name in WORDS:
        features[name] = features[name].astype("object")
    return features[list(FEATURES)]


def _binned(now: pd.DataFrame, before: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return both sides as words: numbers as intervals of the reference, rare values as one."""
    now, before = now.copy(), before.copy()
    for name in FEATURES:
        if name in NUMBERS:
            most = min(now[name].count(), before[name].count()) // FEWEST_PER_BIN
            edges = _edges(before[name], min(BINS, max(2, int(most))))
            now[name], before[name] = _intervals(now[name], edges), _intervals(before[name], edges)
        shares = [side[name].value_counts(normalize=True) for side in (now, before)]
        middle = shares[0].add(shares[1], fill_value=0).sort_values() / 2
        expected = middle * min(now[name].count(), before[name].count())
        rarer = expected.cumsum() - expected  # joined until they are enough
        few = (expected < FEWEST_PER_BIN) | (rarer > 0) & (rarer < FEWEST_PER_BIN)
        rare = few.index[few]
        for side in (now, before):
            side[name] = side[name].mask(side[name].isin(rare), OTHERS)
    return now, before


def _tells(now: pd.Series[Any], before: pd.Series[Any]) -> bool:
    """Say whether the feature's PSI says anything: not where too few have it for bins of it."""
    return bool(now.count() and before.count()) and {*now.dropna(), *before.dropna()} != {OTHERS}


def _edges(reference: pd.Series[Any], bins: int) -> np.ndarray[Any, Any]:
    """Return the inner edges of the bins: of few values the values, else the quantiles."""
    values = np.unique(reference.dropna())
    if len(values) <= bins:
        return np.asarray(np.repeat(values, 2) + np.tile([-1e-9, 1e-9], len(values)))
    return np.asarray(np.unique(np.quantile(reference.dropna(), np.linspace(0, 1, bins + 1)[1:-1])))


def _intervals(values: pd.Series[Any], edges: np.ndarray[Any, Any]) -> pd.Series[Any]:
    """Return "up to 12", "12 to 40", "above 40"; missing stays missing."""
    words = np.array(_labels(edges), dtype=object)[np.searchsorted(edges, values.to_numpy())]
    return values.astype("object").where(values.isna(), words)


def _labels(edges: np.ndarray[Any, Any]) -> list[str]:
    """Return a label for each bin, with as many digits as tell them apart."""
    labels = ["any"]
    for digits in range(4, 18):
        shown = [f"{edge:.{digits}g}" for edge in edges]
        if shown:
            between = (f"{a} to {b}" for a, b in pairwise(shown))
            labels = [f"up to {shown[0]}", *between, f"above {shown[-1]}"]
        if len({*labels}) == len(labels):
            break
    return labels


def _threshold(now: pd.DataFrame, before: pd.DataFrame, name: str, threshold_psi: float) -> float:
    """Return what the feature's PSI must exceed: the setting, or more where rows are few."""
    from scipy.stats import chi2

    bins = len({*now[name].dropna().unique(), *before[name].dropna().unique()})
    if bins < 2:
        return threshold_psi
    chance = float(chi2.ppf(1 - CHANCE, bins - 1))
    return max(threshold_psi, chance * (1 / now[name].count() + 1 / before[name].count()))


def _compare(now: pd.DataFrame, before: pd.DataFrame, thresholds: Mapping[str, float]) -> Any:
    """Return Evidently's snapshot; the method is named, as its default changes with the rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its legacy parts warn on import and in use
        from evidently import DataDefinition, Dataset, Report
        from evidently.metrics import ValueDrift

        definition = DataDefinition(categorical_columns=list(now))
        sides = [Dataset.from_pandas(side, data_definition=definition) for side in (now, before)]
        metrics = [
            ValueDrift(column=name, method="psi", threshold=threshold)
            for name, threshold in thresholds.items()
        ]
        # Without include_tests a report passes whatever it saw. Current comes first.
        return Report(metrics, include_tests=True).run(*sides)


def _prompt_features(text: str) -> tuple[float, float, str, str]:
    """Return characters, share of digits, whether it asks, and the longest word's bucket."""
    content = prompt_from_json(text)[-1].content
    digits = sum(character.isdigit() for character in content) / max(len(content), 1)
    asks = "yes" if content.rstrip().endswith(("?", "？", "؟")) else "no"
    words = content.lower().split()
    longest = max(words, key=lambda word: (len(word), word), default="")
    bucket = zlib.crc32(longest.encode("utf-8", "replace")) % WORD_BUCKETS
    return float(len(content)), digits, asks, f"{bucket:02d}"
