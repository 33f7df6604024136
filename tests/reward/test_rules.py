"""Each function by hand-worked examples: what it sees, what it cannot, how it is made."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.records import Message, RewardInput, Role, user_prompt
from rlhf_pipeline.reward.named import MADE, known_names, named_reward
from rlhf_pipeline.reward.rules import RULES
from rlhf_pipeline.serving.guardrails import output_block

SHARED = Path(__file__).parents[3] / "shared" / "data"
DATA = Path(os.environ.get("RLHF_SHARED_DATA", SHARED))
PROMPT = user_prompt("my parcel is late")
FILMS = {"Alien (1979)": ["horror", "space"], "Airplane!": ["comedy"], "Up": ["comedy", "family"]}


def scores(name: str, *completions: str, prompt: Any = PROMPT, **options: Any) -> list[float]:
    reward = named_reward(name, options)
    return list(reward([RewardInput(prompt, text, ("a b c d",)) for text in completions]))


def test_every_function_keeps_to_its_range() -> None:
    texts = ["", "  ", "yes", "I'm so sorry to hear that. " * 9, "@1 @2 Up (2009)", "{}\n" * 99]
    options = {"format": {"max_lines": 3}}
    for name in {*RULES, *MADE} - {"judge"}:
        found = scores(name, *texts, **options.get(name, {}))
        assert all(0 <= score <= 1 for score in found), (name, found)
    assert {"bleu", "rouge-l", "empathy", "safety", "format", "length"} <= set(known_names())


def test_bleu_is_sacrebleus_and_needs_a_reference() -> None:
    # Against "a b c d": all of it; its first three words, whose brevity costs exp(1 - 4/3).
    whole, short, none = scores("bleu", "a b c d", "a b c", "x y")
    assert whole == pytest.approx(1)
    assert none == 0
    assert short == pytest.approx(2.718281828 ** (-1 / 3))
    with pytest.raises(ModelError, match="bleu needs a reference"):
        RULES["bleu"]([RewardInput(PROMPT, "a")])


def test_empathy_counts_kinds_of_phrases_once_each() -> None:
    assert scores(
        "empathy",
        "Your order has shipped.",
        "I'm sorry, so sorry, I am sorry.",
        "I’m sorry to hear that. I understand how annoying it is.",
        "So sorry. I understand. What happened?",
    ) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert scores("empathy", "tut mir leid", phrases={"reaction": ["tut mir leid"]}) == [1]
    own = {"reaction": ["désolé d’apprendre", "oh no!", "抱歉"], "interpretation": ["i see"]}
    said = ("Désolé d'apprendre ça", "Oh no! Bad.", "我很抱歉听到", "oh nothing", "I seek")
    assert scores("empathy", *said, phrases=own) == [0.5, 0.5, 0.5, 0, 0]
    with pytest.raises(ModelError, match="needs phrases by kind"):
        named_reward("empathy", {"phrases": {}})


def test_a_recommendation_is_new_and_fits_what_was_asked(tmp_path: Path) -> None:
    asked = (Message("user", "a comedy please, not Up"),)
    said = ("Try Airplane!", "Try alien.", "Up is great", "I like films", "Alienation")
    wanted = [1, 0.5, 0, 0, 0]
    assert scores("recommendation", *said, prompt=asked, items=FILMS) == wanted
    path = tmp_path / "films.json"
    path.write_text(json.dumps(FILMS))
    assert scores("recommendation", *said, prompt=asked, items=str(path)) == wanted
    # Who asks for nothing that any item is about is helped by every item.
    assert scores("recommendation", "Try Alien", prompt=user_prompt("hi"), items=FILMS) == [1]


def test_titles_are_found_as_they_are_written_elsewhere() -> None:
    titles = ["Schindler's List", "霸王别姬", "Up"]
    said = ("Watch Schindler’s List tonight", "你可以看霸王别姬这部电影", "Upper")
    assert scores("recommendation", *said, items=titles) == [1, 1, 0]
    assert scores("item-ratio", "schindler’s list", items=titles) == [1]


def test_without_a_catalogue_marked_items_and_titles_with_a_year_count() -> None:
    said = ("How about The Sixth Sense (1999)?", "Have you seen @111776", "in (1999) it rained")
    assert scores("recommendation", *said) == [1, 1, 0]
    again = user_prompt("I saw The Sixth Sense (1999)")
    assert scores("recommendation", said[0], prompt=again) == [0]
    assert scores("item-ratio", "try Up or Airplane!", "no", items=FILMS) == [0.5, 0]


def test_safety_is_what_the_guardrails_find() -> None:
    from rlhf_pipeline.config import GuardrailSettings

    given = user_prompt("I am ann@example.org")
    said = ("Write to bob@example.org", "ann@example.org it is", "first build a small bomb", "fine")
    assert scores("safety", *said, prompt=given) == [0, 1, 0, 1]
    for text in said[:2]:
        found = output_block(text, given, GuardrailSettings(), whole=True)
        assert (found is None) == (scores("safety", text, prompt=given) == [1])
    assert scores("safety", *said, patterns=["fine"], personal_details=False) == [1, 1, 1, 0]


def test_format_is_the_share_of_conditions_met() -> None:
    assert scores("format", '{"a": 1}', " [] ", "no", "{", is_json=True) == [1, 1, 0, 0]
    assert scores("format", "one\ntwo", "ab\nc\nd", pattern="[a-z\n]+", max_lines=2) == [1, 0.5]


def test_length_has_the_window_that_is_asked_for() -> None:
    assert scores("length", "a b", "a", "a b c d e f", shortest=2, longest=3) == [1, 0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("length", {"shortest": 9, "longest": 3}, "1 <= shortest <= longest"),
        ("length", {"short": 9}, "takes the options shortest, longest, found short"),
        ("length", {"shortest": "x"}, "cannot be made with"),
        ("format", {}, "needs a pattern"),
        ("format", {"max_lines": "x"}, "needs max_lines of 1, 2, 3 or more"),
        ("empathy", {"phrases": ["sorry"]}, "needs phrases by kind"),
        ("empathy", {"phrases": {"reaction": "sorry"}}, "needs phrases by kind"),
        ("safety", {"patterns": "bomb"}, "needs a list of regular expressions"),
        ("recommendation", {"items": ["", "Up"]}, "items must be titles"),
        ("judge", {"url": "https://example.org/v1", "model": "m", "rubric": 5}, "cannot be made"),
        ("https://a..b/score", {}, "with a host's name"),
        (".own:reward", {}, "needs 'reward' in the module '.own'"),
        ("https://example.org/", {"attempts": 2.5}, "attempts of 1, 2, 3 or more"),
        ("https://example.org/", {"batch_size": 2.5}, "batch_size of 1, 2, 3 or more"),
        ("https://example.org/", {"timeout_seconds": float("inf")}, "at most, and attempts"),
        ("format", {"pattern": "("}, "needs a regular expression"),
        ("safety", {"patterns": ["("]}, "needs regular expressions"),
        ("recommendation", {"items": "no-such-file.json"}, "items must be titles"),
        ("recommendation", {"items": {"Up": "comedy"}}, "items must be titles"),
        ("distinct-1", {"n": 2}, "'distinct-1' with options"),
        (
            "https://example.org/score?key=s3cret",
            {"n": 2},
            r"at its address takes the options key_v",
        ),
    ],
)
def test_options_that_make_no_function_are_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        named_reward(name, options)


def made_of(word: str) -> Any:
    """Return a reward of one's own, made with an option."""
    return lambda items: [float(word in item.completion) for item in items]


def test_a_function_of_ones_own_may_take_options_and_is_known_by_them() -> None:
    own = f"{__name__}:made_of"
    assert scores(own, "abc", "x", word="b") == [1, 0]
    versions = {getattr(named_reward(own, {"word": word}), "version", None) for word in "ab"}
    assert len(versions) == 2


@pytest.mark.data
def test_recommending_turns_of_real_dialogues_are_told_from_others() -> None:
    path = DATA / "redial_iard"
    if not path.exists():
        pytest.skip(f"needs real dialogues at {path}; set RLHF_SHARED_DATA")
    found: dict[bool, list[float]] = {True: [], False: []}
    text = (path / "formatted_IARD_annotated_partially.json").read_text(encoding="utf-8")
    for dialogue in json.loads(text):
        said: list[Message] = []
        for turn in dialogue["conversation"]:
            role: Role = "user" if turn["participant"] == "USER" else "assistant"
            if role == "assistant" and said:
                recommends = any(act["intent"].startswith("REC") for act in turn["dialogue_acts"])
                found[recommends] += scores("recommendation", turn["utterance"], prompt=tuple(said))
            said.append(Message(role, turn["utterance"]))
    assert sum(found[True]) / len(found[True]) > 0.9  # 950 turns: 0.94
    assert sum(found[False]) / len(found[False]) < 0.05  # 642 turns: 0.02
