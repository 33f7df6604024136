"""Training a reward model on preference pairs, and judging it on pairs it has not seen.

The loss is Bradley-Terry's: -log sigmoid(score(chosen) - score(rejected)), with a target of one
half for ties; kinds.py has that of every other kind. Either the whole model learns (tuning.py), or
(freeze_trunk) only the head is fitted (fitting.py).
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from rlhf_pipeline.errors import NotEnoughData, TrainingError
from rlhf_pipeline.feedback.datasets import opening_of
from rlhf_pipeline.feedback.gold import Tally
from rlhf_pipeline.files import new_folder, write_json
from rlhf_pipeline.records import (
    PreferencePair,
    Progress,
    RewardExample,
    RewardInput,
    ignore_progress,
)
from rlhf_pipeline.reward import RATERS, REPORT, WORST
from rlhf_pipeline.reward.calibration import (
    Bin,
    Confidence,
    accuracy_interval,
    calibration_effect,
    calibration_error,
    calibration_noise,
    fit_confidence,
    pair_accuracy,
    reliability,
)
from rlhf_pipeline.reward.ensemble import Combine
from rlhf_pipeline.reward.fitting import (
    Heard,
    encode_pairs,
    learn,
)
from rlhf_pipeline.reward.heads import Combined, disagreement
from rlhf_pipeline.reward.held_out import (
    Findings,
    HeldOut,
    JudgedBy,
    is_good,
    learnt_floors,
)
from rlhf_pipeline.reward.influence import PartInfluence, of_heads, of_one_head, why_unknown
from rlhf_pipeline.reward.judging import (
    ByPairs,
    ByVotes,
    Judge,
    Lesson,
    Reader,
    check_judge,
)
from rlhf_pipeline.reward.kinds import (
    gather,
    voters_of,
)
from rlhf_pipeline.reward.matched import (
    Matches,
    judging_votes,
)
from rlhf_pipeline.reward.model import (
    Calibration,
    Limits,
    Reads,
    RewardModel,
    check_lengths,
    new_reward_model,
    save_reward_model,
    score_rows,
    scores_by_head,
    scores_of_features,
)
from rlhf_pipeline.reward.plots import plot_report
from rlhf_pipeline.reward.reuse import begin_with
from rlhf_pipeline.reward.tuning import Descent


@dataclass(frozen=True)
class RewardModelReport:
    """What a reward model is worth, measured on held-out pairs that people decided.

    Where these are few, on held-out votes two by two (matched.py): `judged_by` is then "votes", and
    what is said of pairs here goes for these.
    """

    path: Path
    # accuracy
    accuracy: float  # share of held-out pairs ranked as people did
    interval: tuple[float, float]  # its 95 % interval
    n: int  # held-out pairs without ties
    train_accuracy: float | None  # on the training pairs, as seen in the last epoch; None: no pairs
    # what accuracy is read beside: "longer" and "random" know nothing, "bag_of_words" has learnt
    # from the same pairs, "annotators" is how often people agree; the last two where known
    floors: dict[str, float]
    # calibration, on the half of the held-out pairs that did not fit temperature and lapse
    temperature: float
    lapse: float  # share of the votes that no margin foretells
    ece: float  # expected calibration error at that temperature and lapse
    ece_before: float  # the same of plain margins
    ece_noise: float  # up to what a perfectly calibrated model shows on so few pairs
    reliability: tuple[Bin, ...]
    calibrated_on: int  # pairs that fitted temperature and lapse
    # the run
    offset: float  # raw score of the centre completions, subtracted from every score
    score_deviation: float  # standard deviation of the centre completions' scores
    pairs: int  # training pairs, ties among them
    ties: int
    loss_curve: tuple[tuple[int, float], ...]  # (optimizer step, mean loss since the last one)
    seconds: float
    freeze_trunk: bool
    judged_by: JudgedBy = "pairs"
    # the raters
    votes: int = 0  # it learnt from, pairs and whatever else
    raters: int = 0  # who gave them
    doubted: int = 0  # of them, weighed below one half (raters.py), or who hardly looked (kinds.py)
    turned: int = 0  # of them, who were careful until some vote and not from there
    heads: int = 1
    disagreement: float = 0.0  # mean deviation among heads on the held-out completions
    influence: tuple[PartInfluence, ...] = ()  # of each part of the raters (influence.py)
    no_influence: str | None = None  # why it is not known
    findings: Findings | None = None  # for whom it is right, beside what, and where it is not
    undone: str | None = None  # why the trunk is as it was, although it was trained
    began_with: Path | None = None  # the earlier model; None: its base
    why_cold: str | None = None  # why it did not begin with the earlier model it was given


def train_reward_model(
    base: str | Path,
    train_pairs: Sequence[PreferencePair],
    test_pairs: Sequence[PreferencePair],
    output_dir: str | Path,
    *,
    freeze_trunk: bool,
    centre_on: Sequence[RewardInput],
    examples: Sequence[RewardExample] = (),
    test_examples: Sequence[RewardExample] = (),
    usual: Mapping[str, Sequence[str]] | None = None,
    topics: Mapping[str, str] | None = None,
    earlier: Path | None = None,
    kinds: Mapping[str, float] | None = None,
    epochs: float,
    learning_rate: float,
    batch_size: int,
    max_prompt_tokens: int,
    max_completion_tokens: int,
    seed: int,
    reads: Reads | None = None,
    reads_likelihood: bool = False,
    weigh_raters: bool = False,
    gold: Mapping[str, Tally] | None = None,
    heads: int = 1,
    combine: Combine = "median",
    disagreement_weight: float = 1.0,
    lora_rank: int = 0,
    dtype: str = "float32",
    min_pairs: int = 2,
    device: str = "auto",
    report: Progress | None = None,
) -> RewardModelReport:
    """Train on `train_pairs`, judge on `test_pairs`, save in `output_dir` and return the report.

    1. Check the pairs and load the model.
    2. Lay out tokens as sampling does.
    3. Train.
    4. Centre, so that the `centre_on` completions score 0 on average.
    5. Measure accuracy and calibration on held-out pairs, and what else these and `test_examples`
       say (held_out.py; by `topics` too: prompt as JSON -> what it was filed under).
    6. Save model, report.json, worst.json and plots in one rename.

    Where pairs are few test_examples judge it by `usual`, answers of the baseline by prompt as JSON
    to every prompt of matched.judging_votes; without it they never do.
    `base` is a policy folder or an encoder; `reads` is model.py's, the mean where a head is fitted
    first and nothing else is asked for. With reads_likelihood or `kinds` the head is fitted on the
    trunk as it is before all of it is trained: few votes then bend the features less
    (arXiv:2202.10054). With freeze_trunk it stays at that, and epochs, learning_rate and batch_size
    are unused.
    With `kinds` (kind -> weight, kinds.py) it learns from train_pairs and `examples` of those
    kinds, min_pairs counts both, and raters.json keeps who seems to have looked.
    With lora_rank the trunk stays the base's, in this dtype: adapters of that rank are trained
    (none with freeze_trunk) and saved with the head alone, so that other models can share the base.
    With weigh_raters each pair counts as far as its rater's word goes (raters.py; with `kinds`, as
    kinds.py has it), and raters.json keeps that. `gold` is how raters answered gold questions
    (feedback/gold.py), where there were some. Several heads (heads.py; a frozen trunk only) each
    learn from a part of the raters.
    It begins with the `earlier` model's weights where that was made alike, from the same base
    (reuse.py), else the report says why not. Begun so it tells no learning curve, as that trunk has
    seen such pairs. The same seed gives the same model.

    Raises NotEnoughData or TrainingError where the pairs cannot teach or judge a reward.
    """
    # 1. Checks.
    started = time.perf_counter()
    if heads > 1 and not freeze_trunk:
        raise TrainingError(
            f"{heads} heads need a frozen trunk, found one that trains; set reward.freeze_trunk, "
            "or set reward.heads to 1"
        )
    matches = judging_votes(test_pairs, test_examples, kinds or ()) if usual else None
    judge: Judge
    if matches and usual:
        judge = ByVotes.of(matches, usual, topics or {})
    else:
        judge = ByPairs.of(test_pairs, test_examples, topics or {})
    check_pairs(
        train_pairs,
        test_pairs,
        centre_on,
        min_pairs,
        examples=examples,
        matches=matches,
        test_examples=test_examples,
        kinds=kinds,
    )
    report = report or ignore_progress
    limits = Limits(max_prompt_tokens, max_completion_tokens)
    descent = None if freeze_trunk else Descent(epochs, learning_rate, batch_size, seed)
    fits_head = freeze_trunk or reads_likelihood or kinds is not None
    model, tokenizer = new_reward_model(
        base,
        seed=seed,
        reads=reads or ("mean" if fits_head else None),
        likelihood=reads_likelihood,
        on_base=lora_rank > 0,
        lora_rank=0 if freeze_trunk else lora_rank,
        dtype=dtype if lora_rank else "float32",
        device=device,
    )
    check_lengths(model, tokenizer, limits)
    why_cold = None if earlier is None or freeze_trunk else begin_with(model, earlier)
    warm = earlier is not None and not freeze_trunk and why_cold is None

    # 2. Tokens, of what it learns from and of what judges it.
    reader = Reader(model, tokenizer, limits, report)
    train = encode_pairs(tokenizer, train_pairs, limits)
    features: Tensor | None = None
    if kinds is None and (weigh_raters or heads > 1):
        features = reader.features([*train.chosen, *train.rejected])
    held_out = judge.held_out
    rows = judge.rows(reader)
    seen = reader.features(rows) if freeze_trunk else None

    # 3. Training.
    lesson = Lesson(
        pairs=train_pairs,
        rows=train,
        features=features,
        votes=[e for e in examples if (kinds or {}).get(e.kind) and is_good(e) is not None],
    )
    curve = () if warm else judge.curve(reader, lesson, rows, seen)
    if heads > 1:
        model.combined = Combined(combine, disagreement_weight)
    heard = learn(
        model,
        tokenizer,
        train_pairs,
        examples,
        train,
        features,
        limits,
        kinds=kinds,
        descent=descent,
        fits_head=fits_head,
        weigh_raters=weigh_raters,
        gold=gold,
        heads=heads,
        report=report,
    )
    model.eval()

    # 4. Where 0 is.
    centre = score_rows(model, reader.rows([(i.prompt, i.completion) for i in centre_on]))

    # 5. What it is worth.
    by_head = scores_by_head(model, rows) if seen is None else scores_of_features(model, seen)
    scores = model.combined(by_head)
    margins = held_out.margins(scores)
    influence, unknown = _influence(
        model, held_out, heard, by_head, scores, seen, trunk_is_frozen=freeze_trunk
    )
    confidence = fit_confidence([margins[i] for i in held_out.fitting])
    judged = [margins[i] for i in held_out.judging]
    bins = reliability(judged, confidence)
    on = [held_out.on[i] for i in held_out.judging]
    accuracy = pair_accuracy(margins)
    findings = judge.find(reader, scores, lesson, curve)
    result = RewardModelReport(
        path=Path(output_dir),
        accuracy=accuracy,
        interval=accuracy_interval(margins, held_out.on),
        n=len(margins),
        train_accuracy=heard.went.train_accuracy,
        floors={
            "longer": held_out.longer_is_better(),
            "random": 0.5,
            **learnt_floors(findings),
        },
        temperature=confidence.temperature,
        lapse=confidence.lapse,
        ece=calibration_error(bins),
        ece_before=calibration_error(reliability(judged, Confidence())),
        ece_noise=calibration_noise(bins, calibration_effect(judged, confidence, on)),
        reliability=tuple(bins),
        calibrated_on=len(held_out.fitting),
        offset=statistics.fmean(centre),
        score_deviation=statistics.pstdev(centre),
        pairs=len(train),
        ties=sum(not pair.decided for pair in train_pairs),
        loss_curve=tuple(heard.went.loss_curve),
        seconds=time.perf_counter() - started,
        freeze_trunk=freeze_trunk,
        judged_by=held_out.judged_by,
        votes=len(heard.voters),
        raters=len(set(heard.voters)),
        doubted=heard.doubted,
        turned=heard.turned,
        heads=heads,
        disagreement=float(disagreement(by_head).mean()),
        influence=tuple(influence),
        no_influence=unknown,
        findings=findings,
        undone=heard.went.undone,
        began_with=earlier if warm else None,
        why_cold=why_cold,
    )

    # 6. All of it in one rename.
    calibration = Calibration(
        result.offset, result.temperature, result.score_deviation, result.lapse
    )
    with new_folder(output_dir) as folder:
        save_reward_model(model, tokenizer, folder, limits=limits, calibration=calibration)
        began = None if result.began_with is None else str(result.began_with)
        whole = {**asdict(result), "path": str(result.path), "began_with": began}
        write_json(folder / REPORT, whole)
        write_json(folder / WORST, judge.in_words(findings.worst))
        plot_report(result, margins, folder)
        if (told := heard.to_json()) is not None:
            write_json(folder / RATERS, told)
    return result


def _influence(
    model: RewardModel,
    held_out: HeldOut,
    heard: Heard,
    by_head: Tensor,
    scores: Tensor,
    seen: Tensor | None,
    *,
    trunk_is_frozen: bool,
) -> tuple[list[PartInfluence], str | None]:
    """Return what each part of the raters does to the model, or in words why that is not known.

    Of the held-out texts `by_head` are each head's scores (T, heads), `scores` the model's (T,),
    and `seen` the features, where they are known.
    """
    given = Counter(heard.voters)
    if heard.parts:
        per_part = Counter(heard.parts[voter] for voter in heard.voters)
        votes = [per_part[part] for part in range(by_head.shape[1])]

        def margins(some: Tensor) -> Tensor:
            return held_out.ahead(model.combined(some))

        return of_heads(margins, by_head, heard.parts, votes), None
    unknown = why_unknown(trunk_trains=not trunk_is_frozen, raters=len(given))
    if seen is None or heard.went.without is None or unknown is not None:
        return [], unknown
    return of_one_head(
        held_out.ahead(scores), held_out.ahead(seen), heard.went.without, given
    ), None


def check_pairs(
    train_pairs: Sequence[PreferencePair],
    test_pairs: Sequence[PreferencePair],
    centre_on: Sequence[RewardInput],
    min_pairs: int,
    *,
    examples: Sequence[RewardExample],
    matches: Matches | None,
    test_examples: Sequence[RewardExample],
    kinds: Mapping[str, float] | None,
) -> None:
    """Raise NotEnoughData or TrainingError unless a reward can be learnt and judged from these.

    With `kinds` what has no weight in them teaches nothing, and counts for nothing. With `matches`
    these judge, and test_pairs do not; a refusal tells what test_examples there are.
    """
    found = len(train_pairs) if kinds is None else len(voters_of(train_pairs, examples, kinds))
    what = "preference pairs" if kinds is None else f"votes of the kinds {', '.join(kinds)}"
    if found < min_pairs:
        raise NotEnoughData(
            f"reward training needs {min_pairs} {what}, found {found}; "
            f"collect {min_pairs - found} more or lower reward.min_pairs"
        )
    if kinds is None and not any(pair.decided for pair in train_pairs):
        raise NotEnoughData(
            f"reward training needs pairs that people decided, found {len(train_pairs)} ties only; "
            "collect at least 1 preference"
        )
    if kinds is not None and found and not gather(train_pairs, examples, kinds).tells_apart:
        raise NotEnoughData(
            f"reward training needs {what} that tell completions apart, found {found} that all say "
            "the same; collect at least 1 that says otherwise"
        )
    check_judge(test_pairs, matches, test_examples, kinds or ())
    taught: list[PreferencePair | RewardExample] = [*train_pairs, *examples]
    if len({record.prompt for record in taught}) < 2:
        raise NotEnoughData(
            "reward training needs pairs on several prompts, found one prompt only; "
            "collect feedback on at least 1 more"
        )
    # By every letter: data sets that an older release divided so must train to their end.
    openings = {opening_of(record.prompt) for record in taught}
    judged = [pair.prompt for pair in test_pairs] if matches is None else matches.prompts
    seen = sum(opening_of(prompt) in openings for prompt in judged)
    if seen:
        raise TrainingError(
            f"what judges must be of conversations that training does not see, found {seen} of "
            f"{len(judged)} of training's; split by how conversations began"
        )
    if not centre_on:
        raise NotEnoughData(
            "centring needs completions whose mean score is to be 0, found none; "
            "pass the baseline's completions"
        )
    for pair in (*train_pairs, *test_pairs):
        if pair.chosen == pair.rejected and pair.decided:
            raise TrainingError(
                f"a preference needs two different completions, found the same one twice in pair "
                f"{pair.pair_id}; remove it or mark it a tie"
            )
