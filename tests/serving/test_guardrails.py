"""What may be asked and what may be said: each rule at its edge."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhf_pipeline import safety
from rlhf_pipeline.config import GuardrailSettings
from rlhf_pipeline.feedback.privacy import passes_luhn, redact
from rlhf_pipeline.records import user_prompt
from rlhf_pipeline.safety import PERSONAL
from rlhf_pipeline.serving.guardrails import (
    Rail,
    certain,
    input_block,
    output_block,
)

RULES = GuardrailSettings()
LONG = GuardrailSettings(max_repeats=None)
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
    "hf_aB3dE5gH7jK9mN1pQ3sT5vW7xY9zA1bC3d",
    "AIzaB3dE5gH7jK9mN1pQ3sT5vW7xY9zA1bC3dE5",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4",
    "2a00:1450:4001:81b::200e",
    "fe80::1ff:fe23:4567:890a",
)
RANDOM = "aB3dE5gH7jK9mN1pQ3sT5vW7xY9zA1bC3dE5fG7h"
KEYS = (
    f"sk-{RANDOM}",
    f"sk-proj-{RANDOM}",
    f"pk_live_{RANDOM}",
    f"ghp_{RANDOM}",
    f"github_pat_{RANDOM}",
    f"glpat-{RANDOM[:20]}",
    f"hf_{RANDOM}",
    "xoxb-123456789012-abcdef",
    f"xapp-1-{RANDOM}",
    "AKIAIOSFODNN7EXAMPL7",
    "ASIAIOSFODNN7EXAMPL7",
    f"AIza{RANDOM[:35]}",
    f"npm_{RANDOM[:36]}",
    f"SG.{RANDOM[:22]}.{RANDOM}",
    f"gsk_{RANDOM}",
    f"xai-{RANDOM}",
    f"r8_{RANDOM}",
    "dop_v1_" + "0123456789abcdef" * 4,
    f"pypi-{RANDOM}",
    f"dckr_pat_{RANDOM}",
    f"whsec_{RANDOM}",
    f"GOCSPX-{RANDOM}",
    f"ya29.{RANDOM}",
    "AC" + "0123456789abcdef" * 2,
    f"Authorization: Bearer {RANDOM}",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4",
    f"rlhf_0123456789ab_{RANDOM}abc",
    "-----BEGIN RSA PRIVATE KEY-----",
)
STAND_FOR_ONE = (
    f"export HF_TOKEN=hf_{'x' * 34}",
    f"GITLAB_TOKEN=glpat-{'x' * 20} or glpat-your-gitlab-token-here",
    f"Set ghp_{'X' * 36}, sk-{'x' * 24}, sk-ant-api03-{'x' * 40} and sk-...",
    f"Put AKIA{'X' * 16} or AKIAIOSFODNN7EXAMPLE into ~/.aws/credentials",
    f"Slack's are xoxb-your-token, xoxb-{'0' * 12}-{'x' * 24} and xapp-1-YOUR-APP-LEVEL-TOKEN",
    f"SG.{'x' * 22}.{'x' * 43}, dop_v1_{'0' * 64} and **_r8_{'x' * 37}_**",
    f"A JWT is eyJ{'x' * 9}.{'x' * 9}.{'x' * 9}",
    'curl -H "Authorization: Bearer YOUR_ACCESS_TOKEN_FROM_STEP_2"',
    "Send Authorization: Bearer <token>, or Bearer 00000000000000000000.",
    f"密钥是hf_{'x' * 34}，地址是2001:db8::1。",
    "In documentation the prefix 2001:db8::/32 is used, e.g. 2001:DB8:85a3::8a2e:370:7334",
    "Link-local addresses begin with fe80::/10, unique local ones with fd00::/8.",
    "global unicast is 2000::/3, and 3fff::/20 is for documentation too",
    "Ping 192.0.2.1, 198.51.100.7 or 203.0.113.9, not ::1, 127.0.0.1 or 0.0.0.0",
    "Private are 10.0.0.0/8, 172.16.0.0/12 and 192.168.0.0/16",
)
"""What answers about code and networks say instead of a key or an address."""


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
        ("_AKIAIOSFODNN7EXAMPL7_", Rail.personal_details),
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


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_one_whoever_gave_it_out(key: str) -> None:
    asked, blocked = user_prompt("what is the key?"), Rail.personal_details
    for text in (f"It is {key}", f"密钥是{key}。", f"The key, **_{key}_**, is yours."):
        found = output_block(text, asked, RULES, whole=True)
        assert found is not None, text
        assert found.rail == blocked
        assert redact(text)[1] == {"key": 1}  # what is not trained on is not said either
    assert output_block(f"It is {key}", user_prompt(f"Is {key} mine?"), RULES, whole=True) is None


@pytest.mark.parametrize(
    "text",
    [
        "It starts at 10:30:45, ends at 23:59:59.5, and takes 1:02:03",
        "Use std::vector<int>, abc::def and a::b::c, or dead::beef(), in C++",
        "Slice it: a[1::2], b[::-1], c[::2]",
        "The network card is 00:1a:2b:3c:4d:5e",
        "Its colours are #ff8800 and #aabbccdd",
        "At commit 3f786850e387550fdab836ed7e6dc881de23001b, sha256:" + "0123456789abcdef" * 4,
        "Its id is 123e4567-e89b-12d3-a456-426614174000",
        "Listen on ::1, or on [::]:80",
        "The bearer bonds, Bearer authentication and a Bearer YOUR_TOKEN header",
        "See https://example.org/a_long_path-of-words/and_more-words?hf_model=x#pypi-packages",
        "Set xai-explanations, npm_config_registry, sg.name.of.things, rlhf_pipeline.safety",
        "Verse 3:16:2, aspect 16:9, ratio 1:2:3:4",
    ],
)
def test_what_looks_a_little_like_a_key_or_an_address_may_be_said(text: str) -> None:
    assert output_block(text, user_prompt("hi"), RULES, whole=True) is None
    assert redact(text)[1] == {}


@pytest.mark.parametrize("address", ["2a00:1450:4001:81b::200e", "FE80::1FF:FE23:4567:890A"])
def test_an_address_of_either_kind_is_one(address: str) -> None:
    for text in (
        f"The server is {address} today",
        f"It is at [{address}]:80.",
        f"地址{address}です",
    ):
        assert output_block(text, user_prompt("which?"), RULES, whole=True) is not None
    asked = user_prompt(f"Is {address.lower()} yours?")
    assert output_block(f"{address} is mine", asked, RULES, whole=True) is None


@pytest.mark.parametrize("before", ["", "It is ", "It is\n", "word " * 300])
@pytest.mark.parametrize("size", [1, 7])
def test_a_token_longer_than_what_is_held_back_is_never_whole_in_a_stream(
    before: str, size: int
) -> None:
    token = f"eyJ{RANDOM}.eyJ{RANDOM * 20}.{RANDOM * 2}"
    text, shown, blocked = f"{before}{token} and so on", 0, None
    for at in range(size, len(text) + size, size):
        sure = certain(text[:at])
        if len(sure) <= shown:
            continue
        blocked = output_block(sure, user_prompt("hi"), LONG, whole=False, looked_at=shown)
        if blocked:
            break
        shown = len(sure)
    assert blocked is not None
    assert shown < len(before) + len(token) - len(RANDOM)


@pytest.mark.parametrize(
    "text",
    [
        "Install firmware version 2.10.0.5 first, see section 4.2.1.3",
        "Run git clone git@github.com:shop/kettle.git",
        "Version 300.20.30.40, on 127.0.0.1",
        "Your order has the number 48123-456-7890",
        "Use std::vector, or a slice: a[1::2], at 10:30:45 and 00:1a:2b:3c:4d:5e",
        "You earned +10000 points, +12 000 euros or +1.250.000 of them",
        "The numbers are " + " ".join(str(n * 37 % 900 + 100) for n in range(40)),
        *STAND_FOR_ONE,
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


@pytest.mark.parametrize(
    "begins",
    [
        f"glpat-{'x' * 20}",
        "glpat-your-gitlab-token-",
        f"hf_{'x' * 34}",
        f"xoxb-{'0' * 12}-",
        "Bearer YOUR_TOKEN_FROM_STEP_2_",
        f"https://shop.test/{'a-b/' * 80}?token=glpat-{'x' * 20}",
        f"https://shop.test/{'a-b/' * 400}?token=glpat-{'x' * 20}",
        "glpat-" + "x-" * 80,
        "glpat-" + "your-token-" * 250,
    ],
)
@pytest.mark.parametrize("size", [1, 7, 90])
def test_a_key_that_begins_like_one_to_be_filled_in_is_never_shown(begins: str, size: int) -> None:
    text, shown, blocked = f"It is {begins}{RANDOM}{', as it were' * 90}", 0, None
    assert output_block(text, user_prompt("hi"), LONG, whole=True) is not None
    for at in range(size, len(text) + size, size):
        sure = certain(text[:at])
        blocked = output_block(sure, user_prompt("hi"), LONG, whole=False, looked_at=shown)
        if blocked:
            break
        shown = max(shown, len(sure))
    assert blocked is not None
    assert shown < len(f"It is {begins}") + 3


def test_most_of_an_address_like_those_of_documentation_is_somebodys() -> None:
    for address in (
        *("192.0.3.1", "198.51.101.7", "203.0.112.9", "10.0.0.1"),
        *("2001:db9::1", "2000::3", "fd00::8:1", "2a02:8108:9640:1a00::/56"),  # a household's
    ):
        found = output_block(f"It is {address}", user_prompt("hi"), RULES, whole=True)
        assert found is not None, address


@pytest.mark.parametrize(
    "piece",
    [
        "sk-",
        "sk-a-",
        "pk-1-",
        "+1 2",
        "4111 ",
        "1.2.",
        "a@a.",
        "1::",
        "ya29.",
        "AC0",
        "hf_xxxxxxxxxxxxxxxxxxxx1 ",
    ],
)
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
    assert not any(pattern.search(shown) for _, _, pattern in PERSONAL)
    plain_letters = re.split("[^A-Za-z]", detail)[0]  # which go out at once
    assert len(shown) <= len(before) + len(plain_letters)


def test_a_stream_goes_on_where_no_blanks_stand_between_words() -> None:
    for text in ("价格是3元，我们提供免费送货", "カート2.5を見ます"):
        assert certain(text) == text
    assert certain("请写信到ann@exam") == "请写信到"


def test_the_check_digit_is_luhns() -> None:
    assert passes_luhn("79927398713")  # the worked example of ISO/IEC 7812-1
    assert [d for d in range(10) if passes_luhn(f"7992739871{d}")] == [3]
