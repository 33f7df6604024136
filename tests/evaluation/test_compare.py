"""Real tiny policies, untrained: what is checked is the arithmetic around them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from rlhf_pipeline.errors import EvaluationError
from rlhf_pipeline.evaluation.behaviour import BehaviourItem
from rlhf_pipeline.evaluation.compare import compare
from rlhf_pipeline.evaluation.figures import OF_ALL_WORDS
from rlhf_pipeline.evaluation.metrics import Number
from rlhf_pipeline.evaluation.pair_judge import Judged, PairJudge
from rlhf_pipeline.evaluation.plots import write_plots
from rlhf_pipeline.evaluation.report import GATE_SCORE, EvaluationReport, GroupResult, group_rows
from rlhf_pipeline.policy.chat import encode_completion, encode_prompt
from rlhf_pipeline.policy.loading import Policy, load_policy, save_policy
from rlhf_pipeline.policy.sampling import Completion, complete
from rlhf_pipeline.policy.tiny import build_tiny
from rlhf_pipeline.records import (
    EvaluationPrompt,
    Message,
    RewardFunction,
    RewardInput,
    user_prompt,
)
from rlhf_pipeline.reward.composite import CompositeReward, Term
from rlhf_pipeline.reward.named import named_reward
from rlhf_pipeline.reward.rules import words_of
from rlhf_pipeline.reward.settings import Linear
from tests.loopback import answering
from tests.reward.test_judge import Judges

TEXTS = ["how do I bake bread", "what is the time", "tell me a story about rain"]
PROMPTS = [
    EvaluationPrompt(f"p{i}", user_prompt(f"{TEXTS[i % 3]} {i}"), ("a b", "c") if i % 2 else ())
    for i in range(12)
]


def run(
    candidate: Path,
    baseline: Path,
    champion: Path | None = None,
    prompts: Sequence[EvaluationPrompt] = PROMPTS,
    judge: RewardFunction | None = None,
    *,
    others: Mapping[str, RewardFunction] | None = None,
    composite: CompositeReward | None = None,
    temperature: float = 0.8,
    max_prompt_tokens: int = 40,
    behaviour: Sequence[BehaviourItem] = (),
    titles: str | None = None,
    pair_judge: PairJudge | None = None,
) -> EvaluationReport:
    return compare(
        candidate,
        baseline,
        champion,
        prompts,
        judge or letters,
        others or {},
        composite=composite,
        referenced_only=composite is not None,
        titles=titles,
        pair_judge=pair_judge,
        pairs_judged=5,
        max_completion_tokens=8,
        max_prompt_tokens=max_prompt_tokens,
        behaviour=behaviour,
        behaviour_tries=3,
        temperature=temperature,
        seed=3,
        bootstrap_samples=100,
        device="cpu",
    )


def letters(items: Sequence[RewardInput]) -> list[float]:
    """Score by letters: deterministic, and different for most texts."""
    return [sum(map(ord, item.completion)) / 1000 for item in items]


def count(items: Sequence[RewardInput]) -> list[float]:
    return [float(len(item.completion)) for item in items]


def nan_judge(items: Sequence[RewardInput]) -> list[float]:
    return [math.nan] * len(items)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("policies")
    made = {}
    for seed, name in enumerate(("baseline", "champion", "candidate")):
        policy = build_tiny(
            TEXTS, vocabulary=280, layers=1, width=32, heads=2, context=64, seed=seed
        )
        with torch.no_grad():  # untrained, all tokens are equally likely: make some likelier
            for name_, weight in policy.model.named_parameters():
                weight *= 3 if "norm" in name_ else 10 if "layers" in name_ else 1
        made[name] = root / name
        save_policy(policy, made[name])
    other = build_tiny(["zz"], vocabulary=270, layers=1, width=32, heads=2, context=64, seed=0)
    save_policy(other, root / "other")
    return made | {"other": root / "other"}


@pytest.fixture(scope="module")
def report(folders: dict[str, Path]) -> EvaluationReport:
    return run(
        folders["candidate"], folders["baseline"], folders["champion"], others={"proxy": count}
    )


def test_every_system_has_every_number(report: EvaluationReport) -> None:
    for system in ("candidate", "baseline", "champion"):
        assert set(report.numbers[system]) == {
            "gate_score",
            "proxy_score",
            "empathy",
            "item_ratio",
            "length_tokens",
            "repetition",
            "truncation_rate",
            "bleu_1",
            "bleu_2",
            "rouge_l",
            "seconds_per_completion",
            "memory_mib",
            "distinct_1",
            "distinct_2",
            "perplexity",
            "kl_to_baseline",
        }
    assert not report.champion_is_baseline
    assert report.numbers["baseline"]["kl_to_baseline"].value == 0


def test_what_every_answer_says_that_the_others_do_not_is_told(
    folders: dict[str, Path],
) -> None:
    long = user_prompt("how do I bake bread " * 10)  # all that a policy sees of a prompt
    alike = [
        EvaluationPrompt(f"p{n}", (*user_prompt(f"This is question {n}"), *long)) for n in range(20)
    ]
    told = run(folders["candidate"], folders["baseline"], prompts=alike, temperature=1e-4)
    assert set(told.phrases) == {"baseline"}  # who is champion too
    shares = {(phrase.here, phrase.other) for phrase in told.phrases["baseline"]}
    assert shares == {(1.0, 0.0), (0.0, 1.0)}
    one = [replace(alike[0], prompt_id=f"p{n}") for n in range(20)]  # of one conversation
    told = run(folders["candidate"], folders["baseline"], prompts=one, temperature=1e-4)
    assert told.phrases == {"baseline": []}


def test_whatever_is_compared_comes_with_an_interval_around_it(report: EvaluationReport) -> None:
    measured_once = {"seconds_per_completion", "memory_mib"}  # one number each, of this machine
    for against in ("baseline", "champion"):
        found = report.differences[against]
        assert set(found) == set(report.numbers[against]) - measured_once
        here, other = report.numbers["candidate"], report.numbers[against]
        for metric, number in found.items():
            assert number.value == pytest.approx(here[metric].value - other[metric].value)
            assert number.low is not None
            assert number.high is not None
            assert number.low <= number.value <= number.high
    assert report.differences["champion"]["distinct_2"].low != 0
    rows = [row for row in report.table() if row["against"] == "champion"]
    assert {r["name"] for r in rows if r["interval"] == "–"} == measured_once


def test_empathy_and_items_are_counted_whatever_the_recipe_rewards(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    plain = run(folders["candidate"], folders["baseline"])
    said = [sample.completions["candidate"] for sample in plain.samples]
    word = next(word for text in said for word in words_of(text))
    titles = tmp_path / "titles.json"
    titles.write_text(json.dumps([word]))
    with_titles = run(folders["candidate"], folders["baseline"], titles=str(titles))
    assert with_titles.numbers["candidate"]["item_ratio"].value > 0
    assert with_titles.numbers["candidate"]["empathy"].value == 0  # untrained: none of the phrases


def test_differences_and_win_rates_are_of_the_paired_scores(report: EvaluationReport) -> None:
    for against in ("baseline", "champion"):
        pairs = list(zip(report.scores["candidate"], report.scores[against], strict=True))
        mean = sum(a - b for a, b in pairs) / len(pairs)
        wins = sum(1.0 if a > b + 1e-6 else 0.5 if abs(a - b) <= 1e-6 else 0.0 for a, b in pairs)
        assert report.differences[against]["gate_score"].value == pytest.approx(mean)
        assert report.win_rates[against].value == pytest.approx(wins / len(pairs))


def answers_of(policy: Policy) -> list[Completion]:
    prompts = [p.prompt for p in PROMPTS]
    return complete(
        policy,
        prompts,
        max_completion_tokens=8,
        max_prompt_tokens=40,
        temperature=0.8,
        seed=3,
    )


def test_kl_and_perplexity_agree_with_a_slow_loop(
    report: EvaluationReport, folders: dict[str, Path]
) -> None:
    policies = {s: load_policy(folders[s], device="cpu") for s in ("candidate", "baseline")}
    prompts = [p.prompt for p in PROMPTS]
    starts = [encode_prompt(policies["baseline"].tokenizer, p, max_tokens=40) for p in prompts]
    written = answers_of(policies["candidate"])
    tokenizer = policies["baseline"].tokenizer

    def nats(system: str, start: list[int], ids: list[int], temperature: float) -> float:
        with torch.no_grad():
            logits = policies[system].model(torch.tensor([start + ids])).logits[0] / temperature
        steps = logits.log_softmax(-1)
        return sum(float(steps[len(start) - 1 + t, ids[t]]) for t in range(len(ids)))

    log_ratios = [
        nats("candidate", start, c.ids, 0.8) - nats("baseline", start, c.ids, 0.8)
        for start, c in zip(starts, written, strict=True)
    ]
    kl = report.numbers["candidate"]["kl_to_baseline"]
    assert kl.value == pytest.approx(float(np.mean(log_ratios)), rel=1e-4)
    assert kl.value > 0.5

    total, count = 0.0, 0
    for prompt, start in zip(PROMPTS, starts, strict=True):
        for text in prompt.references:
            ids = encode_completion(tokenizer, text, max_tokens=8)
            total += nats("baseline", start, ids, 1.0)
            count += len(ids)
    expected = math.exp(-total / count)
    assert report.numbers["baseline"]["perplexity"].value == pytest.approx(expected, rel=1e-4)


def test_answers_are_those_of_the_one_decode_loop(
    report: EvaluationReport, folders: dict[str, Path]
) -> None:
    written = answers_of(load_policy(folders["champion"], device="cpu"))
    by_id = {p.prompt_id: c.text for p, c in zip(PROMPTS, written, strict=True)}
    assert all(s.completions["champion"] == by_id[s.prompt_id] for s in report.samples)
    numbers = report.numbers["champion"]
    assert numbers["length_tokens"].value == pytest.approx(np.mean([c.tokens for c in written]))
    assert numbers["truncation_rate"].value == pytest.approx(
        np.mean([not c.finished for c in written])
    )


def test_a_policy_against_itself_is_a_draw(folders: dict[str, Path]) -> None:
    calls = []

    def judge(items: Sequence[RewardInput]) -> list[float]:
        calls.append(len(items))
        return letters(items)

    found = run(folders["baseline"], folders["baseline"], judge=judge)
    assert found.champion_is_baseline
    assert calls == [len(PROMPTS)]  # one folder: answered and scored once
    assert found.win_rates["champion"].value == 0.5
    assert found.length_controlled_win_rates["baseline"].value == 0.5
    assert found.differences["champion"]["gate_score"].high == 0
    assert found.metrics()["candidate/kl_to_baseline"] == 0
    assert found.metrics()["vs_champion/length_ratio"] == 1


def test_the_first_generations_columns_coincide(folders: dict[str, Path]) -> None:
    with answering(Judges()) as server:
        server.says = lambda body: json.dumps({"reason": "it is", "better": "tie"})
        judge = PairJudge(server.url, model="m", question="Better?", attempts=1)
        found = run(
            folders["candidate"], folders["baseline"], folders["baseline"], pair_judge=judge
        )
    asked = Judged(Number(0.5, 0.5, 0.5, 5), 1.0, 0, "m")
    assert found.judged == {"baseline": asked, "champion": asked}
    flat = found.metrics()
    for name, value in flat.items():
        if name.startswith("vs_champion/"):
            assert flat[name.replace("champion", "baseline")] == value
    assert "champion" not in found.samples[0].completions
    assert "against champion" not in found.to_markdown()


def test_a_report_survives_json(report: EvaluationReport) -> None:
    text = json.dumps(report.to_json(), allow_nan=False)
    assert EvaluationReport.from_json(json.loads(text)) == report


def test_the_markdown_holds_tables_intervals_and_samples(report: EvaluationReport) -> None:
    text = report.to_markdown()
    assert "| metric | baseline | candidate | change | change % | 95 % interval |" in text
    assert "### Candidate against champion" in text
    assert text.count("**candidate** (") == 10
    assert len({s.prompt_id for s in report.samples}) == 10


def test_completions_cannot_break_out_of_the_markdown(report: EvaluationReport) -> None:
    value = report.to_json()
    value["samples"][0]["completions"]["candidate"] = "a | b\n\n# head <script> ![x](y)"
    text = EvaluationReport.from_json(value).to_markdown()
    assert "<script>" not in text
    assert "\n# head" not in text
    assert "![x]" not in text


def test_the_same_seed_gives_the_same_report(
    report: EvaluationReport, folders: dict[str, Path]
) -> None:
    again = run(
        folders["candidate"], folders["baseline"], folders["champion"], others={"proxy": count}
    )
    for system, numbers in again.numbers.items():
        measured = {"seconds_per_completion", "memory_mib"}  # of this machine, at this moment
        for metric in numbers.keys() - measured:
            assert numbers[metric] == report.numbers[system][metric]
    assert again.samples == report.samples


def test_without_references_there_is_no_perplexity(folders: dict[str, Path]) -> None:
    bare = [EvaluationPrompt(p.prompt_id, p.prompt) for p in PROMPTS]
    found = run(folders["candidate"], folders["baseline"], prompts=bare)
    assert "candidate/perplexity" not in found.metrics()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved."""
    found: list[Figure] = []
    save = Figure.savefig

    def noted(figure: Figure, path: Path, **options: Any) -> None:
        found.append(figure)
        save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", noted)
    return found


def test_plots_are_pictures_with_a_name_at_every_axis(
    report: EvaluationReport, tmp_path: Path, drawn: list[Figure]
) -> None:
    paths = write_plots(report, tmp_path / "plots")
    assert all(axes.get_xlabel() for figure in drawn for axes in figure.axes)
    assert [p.name for p in paths] == ["score_distributions.png", "win_rates.png"]
    for path in paths:
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(("prompts", "told"), [(1, " 1 prompt,"), (12, " 12 prompts,")])
def test_the_picture_says_of_how_many_prompts_it_is(
    report: EvaluationReport, tmp_path: Path, drawn: list[Figure], prompts: int, told: str
) -> None:
    write_plots(replace(report, prompts=prompts), tmp_path)
    assert told in drawn[1].axes[0].get_title()


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_win_rate_of_all_or_nothing_is_a_whole_dot(
    report: EvaluationReport, tmp_path: Path, drawn: list[Figure], rate: float
) -> None:
    rates = dict.fromkeys(("baseline", "champion"), Number(rate, rate, rate, 12))
    write_plots(replace(report, win_rates=rates), tmp_path)
    (axes,) = drawn[1].axes
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert len(dots) == 4
    for dot in dots:
        around = dot.get_window_extent().padded(dot.get_markersize() / 2)
        assert axes.bbox.x0 <= around.x0 < around.x1 <= axes.bbox.x1


def test_turns_of_one_conversation_count_as_one_for_the_gate(folders: dict[str, Path]) -> None:
    first = PROMPTS[0].prompt
    turns = [
        EvaluationPrompt(
            str(i), (*first, *(Message("assistant", "yes"), Message("user", "and?")) * i)
        )
        for i in range(3)
    ]
    others = [EvaluationPrompt(p.prompt_id, p.prompt) for p in PROMPTS[1:]]
    found = run(folders["candidate"], folders["baseline"], prompts=[*turns, *others]).metrics()
    assert found["prompts"] == len(others) + 3
    assert found["conversations"] == len(others) + 1
    alone = run(folders["candidate"], folders["baseline"], prompts=turns)
    for told in (alone.numbers["candidate"], alone.differences["baseline"]):
        assert {metric for metric, number in told.items() if number.low is not None} == set()


def test_what_cannot_be_compared_is_refused(folders: dict[str, Path]) -> None:
    a, b = folders["candidate"], folders["baseline"]
    with pytest.raises(EvaluationError, match="at least 2"):
        run(a, b, prompts=PROMPTS[:1])
    with pytest.raises(EvaluationError, match="temperature above 0"):
        run(a, b, temperature=0.0)
    with pytest.raises(EvaluationError, match="not finite"):
        run(b, b, judge=nan_judge)
    with pytest.raises(EvaluationError, match="one vocabulary"):
        run(folders["other"], b)
    with pytest.raises(EvaluationError, match="the judge's"):
        run(b, b, others={"gate": count})
    with pytest.raises(EvaluationError, match="context of 64"):
        run(b, b, max_prompt_tokens=60)


def test_the_composite_is_told_by_function_on_the_prompts_it_can_judge(
    folders: dict[str, Path],
) -> None:
    composite = CompositeReward(
        {
            "letters": Term(letters, Linear(start=0, end=2, updates=10)),
            "bleu": Term(named_reward("bleu"), weight=0.5, floor=-1.0),
        }
    )
    composite.restore({"update": 5})
    report = run(folders["candidate"], folders["baseline"], composite=composite)
    pieces = report.reward
    assert pieces is not None
    assert pieces.prompts == 6  # those with references
    assert pieces.weights == {"letters": 1, "bleu": 0.5}
    numbers = report.metrics()
    for system in ("candidate", "baseline"):
        raw, whole = pieces.scores[system], pieces.added[system]
        expected = raw["letters"].value + 0.5 * raw["bleu"].value
        assert whole["composite"].value == pytest.approx(expected)
        # The gate's judge is the same function here, asked of all prompts.
        known = np.mean([s for i, s in enumerate(report.scores[system]) if i % 2])
        assert raw["letters"].value == pytest.approx(known)
        assert numbers[f"{system}/reward/letters/score"] == raw["letters"].value
    change = numbers["vs_baseline/reward/letters/added"]
    assert change == pytest.approx(
        numbers["candidate/reward/letters/added"] - numbers["baseline/reward/letters/added"]
    )
    told = report.to_markdown()
    assert "|  | composite | letters | bleu |\n|---|---|---|---|\n| weight |  | 1 | 0.5 |" in told
    judged = [sample for sample in report.samples if sample.pieces]
    assert len(judged) == sum(int(sample.prompt_id[1:]) % 2 for sample in report.samples)
    assert f"reward: letters {judged[0].pieces['candidate']['letters']:+.2f}, bleu +" in told
    assert EvaluationReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_without_functions_a_report_has_no_table_of_them(folders: dict[str, Path]) -> None:
    report = run(folders["candidate"], folders["baseline"])
    assert report.reward is None
    assert "Reward by function" not in report.to_markdown()


def test_behaviour_topics_and_references_are_measured_on_what_is_said(
    folders: dict[str, Path],
) -> None:
    topical = [
        replace(p, topic="bread" if i < 10 else "few", cohort="chat" if i else None)
        for i, p in enumerate(PROMPTS)
    ]
    items = [
        BehaviourItem("says anything", "own", user_prompt("hello"), must_not=(".", "^$")),
        BehaviourItem("says nothing", "own", user_prompt("hello"), must=(".", "^$")),
    ]
    found = run(folders["candidate"], folders["baseline"], prompts=topical, behaviour=items)
    assert [r.failures for r in found.behaviour] == [
        {"candidate": 3, "champion": 3, "baseline": 3},
        {"candidate": 0, "champion": 0, "baseline": 0},
    ]
    assert found.metrics()["vs_champion/behaviour_worse"] == 0
    assert list(found.topics) == ["bread"]
    assert {name: of.win_rate.n for name, of in found.cohorts.items()} == {"chat": 11}
    assert EvaluationReport.from_json(found.to_json()) == found
    newer = {**found.to_json(), "seen_by_the_moon": 1}
    with pytest.raises(
        EvaluationError, match=r"seen_by_the_moon.*; install the release that wrote"
    ):
        EvaluationReport.from_json(newer)
    assert "### By cohort, against the champion" in found.to_markdown()
    pairs = list(zip(found.scores["candidate"], found.scores["champion"], strict=True))[:10]
    assert found.topics["bread"].difference.value == pytest.approx(
        sum(a - b for a, b in pairs) / 10
    )
    bread = found.topics["bread"].others
    assert set(bread) == set(found.differences["baseline"]) - {GATE_SCORE, *OF_ALL_WORDS} - {
        "perplexity"
    }
    assert bread["rouge_l"].n == 5  # of its ten prompts, those with references
    of_all = [row for row in found.group_table() if row["group"] == "cohort chat"]
    assert [row["metric"] for row in of_all] == ["score", *bread]
    surely = GroupResult(Number(0.6, n=9), Number(0.1, n=9), {"length": Number(-2, -3, -1, 9)})
    assert group_rows({"tea": surely})[0][-1] == "length -2.000 (-3.000 to -1.000)"
    assert found.numbers["candidate"]["rouge_l"].n == 6  # every second prompt has references
