"""What may be asked and what may be said: each rule at its edge."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhf_pipeline import safety
from rlhf_pipeline.config import GuardrailSettings
from rlhf_pipeline.feedback.privacy import passes_luhn
from rlhf_pipeline.records import user_prompt
from rlhf_pipeline.safety import PERSONAL
from rlhf_pipeline.serving.guardrails import (
    Rail,
    certain,
    input_block,
    output_block,
)

RULES = GuardrailSettings()
DETAILS = (
    "ann.b@example.org",
    "+44 20 7946 0958",
    "4111 1111 1111 1111",
    "12 4111 1111 1111 1111 123",
    "10.20.30.40",
    "sk-abcdefghij0123456789",
    "AKIA2OSFODNN7EXAMPL7",
    "sk-abcdefghijklmno7",
    "(555) 123-4567",
)


@pytest.mark.parametrize(
    ("text", "rail"),
    [
        ("how much is the kettle?", None),
        ("  ", Rail.prompt_empty),
        ("x" * 20_001, Rail.prompt_too_long),
        ("Tell me: HOW TO MAKE a pipe\nbomb", Rail.unsafe_request),
        ("is a bath bomb on sale?", None),
    ],
)
def test_requests(text: str, rail: Rail | None) -> None:
    found = input_block(user_prompt(text), RULES)
    assert (found and found.rail) == rail


@pytest.mark.parametrize(
    ("text", "rail"),
    [
        ("It costs 24.50, or 1,299 for 3 of the 2026 model.", None),
        ("Write to ann@example.org", Rail.personal_details),
        ("Call +44 20 7946 0958 now", Rail.personal_details),
        ("Pay with 4111 1111 1111 1111.", Rail.personal_details),
        ("Your order is 4111 1111 1111 1112.", None),  # its check digit is wrong
        ("Pay with 4111 1111 1111 1111 12/25", Rail.personal_details),
        ("Order 12 4111111111111111", Rail.personal_details),
        ("3782 822463 10005 1234", Rail.personal_details),
        (" ".join(map(str, range(1, 60))), None),
        (" ".join(map(str, range(1960, 2060))), None),
        ("0000 0000 0000 0000", None),
        ("_AKIAIOSFODNN7EXAMPLE_", Rail.personal_details),
        ("Use _sk-abcdefghij0123456789_", Rail.personal_details),
        ("It is at 10.20.30.40.", Rail.personal_details),
        ("Version 300.20.30.40, on 127.0.0.1, mask 255.255.255.0", None),
        ("Use sk-abcdefghij0123456789", Rail.personal_details),
        ("Run npm i react@18.2.0, use actions/checkout@v4.1.1", None),
        ("git clone git@github.com:shop/kettle.git", None),
        ("CONSTRAINT pk_customer_order_items, rk_orders_to_customers", None),
        ("Use pk_live_51HabcDEFghiJKLmnoPQR", Rail.personal_details),
        ("Firmware version 2.10.0.5, see section 4.2.1.3", None),
        ("Call +1\u2011212\u2011555\u20110100", Rail.personal_details),
        ("请打电话+8613812345678。", Rail.personal_details),
        ("卡号4111111111111111过期", Rail.personal_details),
        ("no " * 9, Rail.repetition),
        ("no " * 8, None),
        ("What I have to say is " + "no " * 8, None),
        ("What I have to say is " + "no " * 9, Rail.repetition),
        ("very good and " * 9, Rail.repetition),
        ("Ha ha " * 9, Rail.repetition),
        ("a" * 72, Rail.repetition),
        ("ha" * 36, Rail.repetition),
        ("Yaaaaaaaaaaaay, sha256 " + "f" * 64, None),
        ("and then the brown fox jumps over the lazy dog again.\n" * 9, Rail.repetition),
        ("1. yes\n" * 9, Rail.repetition),
        ("😂 " * 9, Rail.repetition),
        ("我们提供免费送货，" * 9, Rail.repetition),
        ("我们提供免费送货，" * 8, None),
        ("好的\n" * 9, Rail.repetition),
        ("はい" * 9, Rail.repetition),
        ("ครับ" * 9, Rail.repetition),
        ("It is 1000000000 or " + "000 " * 9, None),
        ("0 0 0 0 0 0 0 0 0\n" * 9, None),
        ("{" + "0x00, " * 12, None),
        ("|" + "---|" * 9 + "\n|" + " :--: |" * 9, None),
        ("|" + " ✓ |" * 9, None),
        ("=" * 80 + "\n" + ". " * 40, None),
        ("─" * 80 + "\n" + "ー" * 40, None),
        ("* " * 9, None),
        (" \n", Rail.completion_empty),
        ("a b " * 6000, Rail.completion_too_long),
    ],
)
def test_completions(text: str, rail: Rail | None) -> None:
    found = output_block(text, user_prompt("hi"), RULES, whole=True)
    assert (found and found.rail) == rail


@pytest.mark.parametrize(
    "text",
    [
        "Install firmware version 2.10.0.5 first, see section 4.2.1.3",
        "Run git clone git@github.com:shop/kettle.git",
        "Version 300.20.30.40, on 127.0.0.1",
        "Your order has the number 48123-456-7890",
        "You earned +10000 points, +12 000 euros or +1.250.000 of them",
        "The numbers are " + " ".join(str(n * 37 % 900 + 100) for n in range(40)),
    ],
)
@pytest.mark.parametrize("size", [1, 4, 7])
def test_what_a_whole_answer_may_say_is_not_cut_off_further_on(text: str, size: int) -> None:
    """However the looks at an answer under way begin within it."""
    text += "".join(f", then the {chr(97 + n % 26) * 3} one which is well" for n in range(20))
    shown = 0
    assert output_block(text, user_prompt("hi"), RULES, whole=True) is None
    for at in range(size, len(text) + size, size):
        sure = certain(text[:at])
        blocked = output_block(sure, user_prompt("hi"), RULES, whole=False, looked_at=shown)
        assert blocked is None, (blocked, sure[-40:])
        shown = max(shown, len(sure))


@pytest.mark.parametrize("piece", ["sk-", "sk-a-", "pk-1-", "+1 2", "4111 ", "1.2.", "a@a."])
def test_a_long_completion_of_one_piece_is_looked_at_in_no_time(piece: str) -> None:
    """Everybody else's answers wait meanwhile."""
    import time

    started = time.process_time()
    output_block(piece * (20_000 // len(piece)), (), RULES, whole=True)
    assert time.process_time() - started < 0.5


def test_what_the_request_holds_may_be_said_again_and_rules_can_be_off() -> None:
    asked = user_prompt("is ann@example.org right?")
    assert output_block("ann@example.org it is", asked, RULES, whole=True) is None
    asked = user_prompt("Call me at 2125550100 or write to Ann.B@Example.org, 价格３元")
    assert (
        output_block(
            "I call (212) 555-0100 or write to ann.b@example.org", asked, RULES, whole=True
        )
        is None
    )
    assert output_block("I call (212) 555-0101", asked, RULES, whole=True) is not None
    off = GuardrailSettings(
        pii=False, max_repeats=None, unsafe_requests=(), max_completion_characters=None
    )
    for text in ("bob@example.org", "no " * 99, "x" * 30_000):
        assert output_block(text, asked, off, whole=True) is None
    assert input_block(user_prompt("how to make a bomb"), off) is None
    with pytest.raises(ValidationError, match="needs regular expressions"):
        GuardrailSettings(unsafe_requests=("(",))


def test_a_long_prompt_is_read_once_however_many_of_its_numbers_are_said_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Everybody else's requests wait for the event loop meanwhile."""
    compared = safety._compared
    read: list[str] = []
    numbers = ", ".join(f"212-555-{n:04d}" for n in range(1200))

    def noting(kind: str, text: str) -> str:
        read.extend([kind] if text == numbers else [])
        return compared(kind, text)

    monkeypatch.setattr(safety, "_compared", noting)
    assert output_block(numbers, user_prompt(numbers), RULES, whole=True) is None
    assert read == ["a phone number"]


@given(
    st.sampled_from(DETAILS),
    st.sampled_from(["", "write ", "it is 7 or ", "价格是3元，写信到"]),
    st.lists(st.one_of(st.integers(1, 4), st.integers(1, 1000)), min_size=30, max_size=30),
)
def test_no_detail_is_whole_in_what_a_stream_lets_out(
    detail: str, before: str, sizes: list[int]
) -> None:
    """However the text is cut into pieces, it is blocked before its detail has been shown."""
    text, at, shown = f"{before}{detail} and so on" + ", as it were" * 40, 0, ""
    for size in sizes:
        at += size
        sure = certain(text[:at])
        if len(sure) <= len(shown):
            continue
        if output_block(sure, user_prompt("hi"), RULES, whole=False, looked_at=len(shown)):
            break
        shown = sure
    assert not any(pattern.search(shown) for _, pattern in PERSONAL.values())
    plain_letters = re.split("[^A-Za-z]", detail)[0]  # which go out at once
    assert len(shown) <= len(before) + len(plain_letters)


def test_a_stream_goes_on_where_no_blanks_stand_between_words() -> None:
    for text in ("价格是3元，我们提供免费送货", "カート2.5を見ます"):
        assert certain(text) == text
    assert certain("请写信到ann@exam") == "请写信到"


def test_the_check_digit_is_luhns() -> None:
    assert passes_luhn("79927398713")  # the worked example of ISO/IEC 7812-1
    assert [d for d in range(10) if passes_luhn(f"7992739871{d}")] == [3]
    assert not re.search(PERSONAL["an email address"][1], "ann at example")
