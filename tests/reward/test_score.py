"""`rlhf score`, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf_pipeline.cli import app
from rlhf_pipeline.commands.score import read_items, weighted_terms
from rlhf_pipeline.errors import ConfigError

LINES = 70  # more than a block


@pytest.fixture
def completions(tmp_path: Path) -> Path:
    path = tmp_path / "completions.jsonl"
    rows = [{"prompt": f"question {i}", "completion": "a b " * (i % 4)} for i in range(LINES)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rlhf_score(*words: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["score", *map(str, words)])
    assert done.exit_code == code, done.output
    return done.output


def test_every_line_gets_its_weighted_sum_and_its_pieces(completions: Path, tmp_path: Path) -> None:
    out = tmp_path / "scores.jsonl"
    told = rlhf_score(completions, "--reward", "distinct-1=2", "--reward", "length", "--out", out)
    assert told == f"{LINES} scores in {out}\n"
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["number"] for line in lines] == list(range(1, LINES + 1))
    # "a b a b": two of four words differ; four words of the five that are enough.
    assert lines[2]["pieces"]["distinct-1"] == {"score": 0.5, "added": 1.0}
    assert lines[2]["score"] == pytest.approx(1.8)
    assert lines[2]["prompt"] == [{"role": "user", "content": "question 2"}]


def test_an_interrupted_file_is_gone_on_with(completions: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    rlhf_score(completions, "--reward", "length", "--out", whole)
    lines = whole.read_text().splitlines(keepends=True)
    for kept in (0, 10, 66):  # killed in the middle of a line
        broken.write_text("".join(lines[:kept]) + lines[kept][:30])
        told = rlhf_score(completions, "--reward", "length", "--out", broken)
        assert (f", {kept} of them were there before" in told) == bool(kept)
        assert broken.read_text() == whole.read_text()


def test_scores_of_another_reward_or_file_are_not_mixed_in(
    completions: Path, tmp_path: Path
) -> None:
    out, other = tmp_path / "scores.jsonl", tmp_path / "other.jsonl"
    rlhf_score(completions, "--reward", "length", "--out", out)
    before = out.read_text()
    other.write_text('{"prompt": "another", "completion": "x"}\n')
    for words in ((completions, "--reward", "length=2"), (other, "--reward", "length")):
        assert "same completions" in rlhf_score(*words, "--out", out, code=1)
    assert "a new file" in rlhf_score(completions, "--reward", "length", "--out", other, code=1)
    assert out.read_text() == before
    other.write_text('{"mine": 1}')  # one line without an end is no line of ours that broke off
    assert "a new file" in rlhf_score(completions, "--reward", "length", "--out", other, code=1)
    assert other.read_text() == '{"mine": 1}'


@pytest.mark.parametrize(
    ("content", "rewards", "message"),
    [
        ('{"prompt": "x"}\n', ["length"], "in.jsonl:1 needs"),
        ('{"prompt": "x", "completion": 3}\n', ["length"], "in.jsonl:1 needs"),
        ('{"prompt": "x", "completion": "y", "references": "z"}\n', ["length"], "1 needs"),
        ("\n", ["length"], "found none; write some"),
        ('{"prompt": "x", "completion": "y"}\n', ["lenght"], "needed a reward's name"),
        ('{"prompt": "x", "completion": "y"}\n', ["length", "length=2"], "found length twice"),
        ('{"prompt": "x", "completion": "y"}\n', ["rouge-l"], "needs a reference"),
    ],
)
def test_score_says_what_it_needs(
    tmp_path: Path, content: str, rewards: list[str], message: str
) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(content)
    words = [word for name in rewards for word in ("--reward", name)]
    assert message in rlhf_score(path, *words, "--out", out, code=1)
    assert not out.exists() or not out.read_text()


def test_a_weight_stands_behind_a_name_and_no_querys_number_is_one() -> None:
    asked = (
        ("length=0.5", "length", 0.5),
        ("https://h.example/score=2", "https://h.example/score", 2.0),
        ("https://h.example/score?model=3", "https://h.example/score?model=3", 1.0),
        ("https://h.example/score?model=a", "https://h.example/score?model=a", 1.0),
    )
    for words, name, weight in asked:
        [(found, term)] = weighted_terms([words]).items()
        assert (found, term.weight) == (name, weight)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "x", "completion": "y"}\n', encoding="utf-8-sig")
    assert [item.completion for item in read_items(path)] == ["y"]


@pytest.mark.parametrize("value", ['"half \\ud83d"', "[" * 100_000, "5"])
def test_a_completion_that_cannot_be_one_is_named_by_its_line(tmp_path: Path, value: str) -> None:
    path = tmp_path / "said.jsonl"
    path.write_text(f'{{"prompt": "x", "completion": {value}}}\n')
    with pytest.raises(ConfigError, match=r"said.jsonl:1 needs"):
        read_items(path)


def test_score_needs_a_file(tmp_path: Path) -> None:
    words = (tmp_path / "no.jsonl", "--reward", "length", "--out", tmp_path / "out.jsonl")
    assert "file of JSON lines is needed" in rlhf_score(*words, code=1)


def test_a_preset_scores_as_a_recipe_would(completions: Path, tmp_path: Path) -> None:
    out, preset = tmp_path / "scores.jsonl", tmp_path / "own.yaml"
    preset.write_text("{length: {weight: 2, options: {shortest: 1}}, empathy: 1, learned: null}")
    told = rlhf_score(completions, "--preset", preset, "--out", out)
    assert told == f"{LINES} scores in {out}\n"
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["score"] for line in lines[:3]] == [0, 2, 2]
    assert list(lines[1]["pieces"]) == ["length", "empathy"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "found neither"),
        (["--reward", "length", "--preset", "balanced"], "found both"),
        (["--preset", "balanced"], "learned and --learned come together"),
        (["--preset", "safe.yaml"], "learned and --learned come together"),
        (["--preset", "nobodys"], "reward.preset knows empathy"),
    ],
)
def test_score_needs_rewards_or_a_preset(
    completions: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    (tmp_path / "safe.yaml").write_text("{'learned:safety': 1}")
    words = [str(tmp_path / word) if word.endswith(".yaml") else word for word in words]
    told = rlhf_score(completions, *words, "--out", tmp_path / "out.jsonl", code=1)
    assert message in " ".join(told.split())
