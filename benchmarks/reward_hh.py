"""A reward model on real people's pairs: HH helpful-base and -online, 5-fold by conversation.

    python -m benchmarks.reward_hh [--data FOLDER] [--sets helpful-base helpful-online]

The pairs come in as a turn's do (ingested, frozen, validated). In each fold a small encoder starts
from nothing: a tokenizer and weights of its own, from the fold's training pairs alone; nothing is
pretrained. Beside it what knows less: always the longer completion, and a bag of words. Settings
were fixed before any number was seen. The data is read where it lies: --data, or RLHF_SHARED_DATA.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from rlhf_pipeline.database import open_database
from rlhf_pipeline.evaluation.metrics import wilson_interval
from rlhf_pipeline.feedback import datasets, snapshot
from rlhf_pipeline.feedback.ingest import ingest
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.feedback.validation import validate
from rlhf_pipeline.records import PreferencePair, RewardInput
from rlhf_pipeline.reward.calibration import (
    Bin,
    Confidence,
    calibration_error,
    calibration_noise,
    fit_confidence,
    pair_accuracy,
    reliability,
)
from rlhf_pipeline.reward.held_out import of_like_length
from rlhf_pipeline.reward.judging import halves
from rlhf_pipeline.reward.model import load_reward_model
from rlhf_pipeline.reward.training import train_reward_model

DATA = Path(os.environ.get("RLHF_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
SETS = ("helpful-base", "helpful-online")
FOLDS = 5
VOCABULARY, LAYERS, WIDTH, HEADS = 4096, 2, 128, 4
PROMPT_TOKENS, COMPLETION_TOKENS = 64, 192
EPOCHS, LEARNING_RATE, BATCH = 3, 5e-4, 32
RESAMPLES = 400
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]


@dataclass(frozen=True)
class Judged:
    """One held-out pair and what each way of judging makes of it."""

    pair: PreferencePair
    margin: float  # of the encoder
    confidence: Confidence  # in such margins, fitted on other pairs
    words: float  # of the bag of words

    @property
    def longer(self) -> float:
        """Return the margin of always preferring the longer completion."""
        return float(len(self.pair.chosen) - len(self.pair.rejected))


def clean_pairs(path: Path, folder: Path) -> list[PreferencePair]:
    """Return the file's pairs that validation lets through."""
    database = open_database(f"sqlite:///{folder}/{path.name}.db")
    store = FeedbackStore(database)
    ingest(store, path, "hh")
    watermark = snapshot.newest_seq(database, "hh")
    frozen = snapshot.take(database, "hh", watermark, folder / f"{path.name}.parquet")
    clean = validate(snapshot.read(frozen.path)).clean
    database.close()
    built = datasets.build(clean, evaluation_share=0.0, min_rating=4)
    return list(built.preference_pairs)


def new_encoder(pairs: Sequence[PreferencePair], folder: Path, seed: int) -> int:
    """Save an encoder that has learnt nothing, with a tokenizer of the pairs' texts.

    Returns how many weights it has.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = [text for pair in pairs for text in (_asked(pair), pair.chosen, pair.rejected)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIAL,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=PROMPT_TOKENS + COMPLETION_TOKENS,
    )
    model = BertModel(config, add_pooling_layer=False)
    model.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def encoder_margins(
    train: Sequence[PreferencePair], test: Sequence[PreferencePair], folder: Path, seed: int
) -> tuple[list[float], int]:
    """Return the margins of a reward model trained here, and how many weights its encoder has."""
    size = new_encoder(train, folder / "base", seed)
    train_reward_model(
        folder / "base",
        train,
        test,
        folder / "reward",
        freeze_trunk=False,
        reads="mean",
        centre_on=[RewardInput(pair.prompt, pair.rejected) for pair in train[:100]],
        epochs=EPOCHS,
        learning_rate=LEARNING_RATE,
        batch_size=BATCH,
        max_prompt_tokens=PROMPT_TOKENS,
        max_completion_tokens=COMPLETION_TOKENS,
        seed=seed,
        device="cpu",
    )
    reward = load_reward_model(folder / "reward", device="cpu")
    chosen = reward([RewardInput(pair.prompt, pair.chosen) for pair in test])
    rejected = reward([RewardInput(pair.prompt, pair.rejected) for pair in test])
    return [c - r for c, r in zip(chosen, rejected, strict=True)], size


def confidences(margins: Sequence[float], pairs: Sequence[PreferencePair]) -> list[Confidence]:
    """Return the confidence in each margin that the other half of the prompts fitted."""
    one, other = halves(pairs)
    fitted: dict[int, Confidence] = {}
    for fitting, judging in ((one, other), (other, one)):
        fitted |= dict.fromkeys(judging, fit_confidence([margins[i] for i in fitting]))
    return [fitted[i] for i in range(len(margins))]


def word_margins(train: Sequence[PreferencePair], test: Sequence[PreferencePair]) -> list[float]:
    """Return the margins of a logistic regression on which words a completion has."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    vectors: Any = CountVectorizer(min_df=2, binary=True)
    vectors.fit([text for pair in train for text in (pair.chosen, pair.rejected)])

    def differences(pairs: Sequence[PreferencePair]) -> Any:
        sides = ([pair.chosen for pair in pairs], [pair.rejected for pair in pairs])
        return vectors.transform(sides[0]) - vectors.transform(sides[1])

    signs = [1 if i % 2 else -1 for i in range(len(train))]  # both classes, or nothing is fitted
    told = differences(train)
    flipped = told.multiply(torch.tensor(signs)[:, None].numpy()).tocsr()
    # Strong shrinkage: words are more than pairs.
    model: Any = LogisticRegression(C=0.03, fit_intercept=False, max_iter=1000)
    model.fit(flipped, signs)
    found: list[float] = model.decision_function(differences(test)).tolist()
    return found


def folds(pairs: Sequence[PreferencePair]) -> list[list[int]]:
    """Return the pairs' numbers in FOLDS parts; a conversation's pairs are in one."""
    parts: list[list[int]] = [[] for _ in range(FOLDS)]
    for i, pair in enumerate(pairs):
        parts[int(datasets.conversation_of(pair.prompt)[:8], 16) % FOLDS].append(i)
    return parts


def judged_in(
    name: str, pairs: Sequence[PreferencePair], folder: Path, minutes: float
) -> list[Judged]:
    """Return every pair, judged in the fold that did not train on it; prints a line a fold.

    No fold begins that would not end within the minutes, so there may be fewer than FOLDS.
    """
    found: list[Judged] = []
    began = time.perf_counter()
    for fold, members in enumerate(folds(pairs)):
        started = time.perf_counter()
        if fold and (started - began) * (fold + 1) / fold > 60 * minutes:
            print(f"{name}: {minutes:g} minutes are up, {fold} of {FOLDS} folds are judged")
            break
        kept_out = set(members)
        test = [pairs[i] for i in members]
        train = [pair for i, pair in enumerate(pairs) if i not in kept_out]
        margins, size = encoder_margins(train, test, folder / f"{name}-{fold}", seed=fold)
        words = word_margins(train, test)
        sure = confidences(margins, test)
        found += [Judged(*one) for one in zip(test, margins, sure, words, strict=True)]
        print(
            f"{name}, fold {fold}: {len(train)} pairs train, {len(test)} test; encoder of "
            f"{size:,} weights {pair_accuracy(margins):.3f}, words {pair_accuracy(words):.3f}, "
            f"{time.perf_counter() - started:.0f} s",
            flush=True,
        )
    return found


def table(name: str, judged: Sequence[Judged]) -> None:
    """Print accuracies with intervals, on all pairs and on those of like length; then the ECE."""
    print(f"\n| {name} | pairs | longer | bag of words | encoder |\n|---|---|---|---|---|")
    for what, some in (
        ("all", judged),
        ("of like length", [one for one in judged if of_like_length(one.pair)]),
    ):
        columns = ([o.longer for o in some], [o.words for o in some], [o.margin for o in some])
        cells = " | ".join(_accuracy(column) for column in columns)
        print(f"| {what} | {len(some)} | {cells} |")

    def bins_of(some: Sequence[Judged]) -> list[Bin]:
        return reliability([one.margin for one in some], [one.confidence for one in some])

    bins = bins_of(judged)
    draw = random.Random(name)
    resampled = sorted(
        calibration_error(bins_of(draw.choices(judged, k=len(judged)))) for _ in range(RESAMPLES)
    )
    low, high = resampled[round(0.025 * RESAMPLES)], resampled[round(0.975 * RESAMPLES) - 1]
    print(
        f"\nECE of the calibrated {calibration_error(bins):.3f} ({low:.3f} to {high:.3f}; "
        f"{calibration_noise(bins):.3f} is to be expected of perfect calibration on so few)\n",
        flush=True,
    )


def _accuracy(margins: Sequence[float]) -> str:
    accuracy = pair_accuracy(margins)
    low, high = wilson_interval(accuracy, len(margins))
    return f"{accuracy:.3f} ({low:.3f} to {high:.3f})"


def _asked(pair: PreferencePair) -> str:
    return "\n".join(message.content for message in pair.prompt)


def main() -> None:
    """Print a line a fold and the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument(
        "--minutes", type=float, default=25, help="for each set; the last fold fits"
    )
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    arguments = parser.parse_args()
    for name in arguments.sets:
        with tempfile.TemporaryDirectory() as scratch:
            path = arguments.data / "hh_rlhf" / f"{name}.test.jsonl.gz"
            pairs = clean_pairs(path, Path(scratch))
            table(name, judged_in(name, pairs, Path(scratch), arguments.minutes))


if __name__ == "__main__":
    main()
