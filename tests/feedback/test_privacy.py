"""What is taken out of texts, and what stays in them."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_pipeline.config import FeedbackSettings
from rlhf_pipeline.feedback.privacy import NATIONAL, redact, unknown_regions


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("write to ann.b+x@mail.example.org.", "write to [email]."),
        ("call +49 30 1234567 or (212) 555-0100", "call [phone] or [phone]"),
        ("+1 (212) 555-0100, 212-555-0100", "[phone], [phone]"),
        ("212 555 0100, 650.253.0000 or 1-800-275-2273", "[phone], [phone] or [phone]"),
        ("ring 07700 900123, 030 901820, (030) 901820", "ring [phone], [phone], [phone]"),
        ("au 01 42 68 53 00 ou 0049 30 901820.", "au [phone] ou [phone]."),
        ("212-555-0199x123, (212) 555-0199x12", "[phone]x123, [phone]x12"),
        ("+1 212 555 0199x7 or 212-555-0199ext5", "[phone]x7 or [phone]ext5"),
        ("card 4111 1111 1111 1111!", "card [card]!"),
        # As pages and models write them: no-break blanks and hyphens, wide signs.
        (
            "+1\u00a0212\u00a0555\u00a00100, 212\u2011555\u20110100, +49\u202f30\u202f1234567",
            "[phone], [phone], [phone]",
        ),
        (
            "4111\u00a01111\u00a01111\u00a01111, 4111\u20111111\u20111111\u20111111",
            "[card], [card]",
        ),
        (
            "\u00a0ann＠example.org\u2011\u202fyes, ＋８１ ３ １２３４ ５６７８",
            "\u00a0[email]\u2011\u202fyes, [phone]",
        ),
        # In scripts without blanks between words nothing stands around what is looked for.
        ("请写信到ann@example.com，谢谢", "请写信到[email]，谢谢"),
        ("我" * 99 + "的邮箱是ann@example.com谢谢。", "我" * 99 + "的邮箱是[email]谢谢。"),
        ("写信到zhang@例子.中国谢谢, kim@예시.한국", "写信到[email]谢谢, [email]"),
        ("mail@ตัวอย่าง.ไทย, почта@пример.рф", "[email], [email]"),
        ("卡号4111111111111111过期，电话+8613812345678。", "卡号[card]过期，电话[phone]。"),
        ("ann@example.com입니다. 서버는 192.0.2.17입니다", "[email]입니다. 서버는 [ip]입니다"),
        ("メールは用户@example.comです、โทร+66 2 123 4567ครับ", "[email]です、โทร[phone]ครับ"),
        ("378282246310005", "[card]"),
        ("my card 4111 1111 1111 1111 12/25", "my card [card] 12/25"),
        ("4111111111111111 123, 4111 1111 1111 1111 - 123", "[card] 123, [card] - 123"),
        ("order 12 4111-1111-1111-1111, 3782 822463 10005 1234", "order 12 [card], [card] 1234"),
        ("6011 0000 0000 0000 4111 1111 1111 1111", "6011 0000 0000 0000 [card]"),
        ("4111 1111 1111 1111 5500 0000 0000 0004 2027", "[card] [card] 2027"),
        ("7 30569309025904, 3056 930902 5904 8", "7 [card], [card] 8"),
        ("_4111 1111 1111 1111_ and 41 11 11 11 11 11 11 11", "_[card]_ and [card]"),
        (
            "4222222222222, 5105105105105100, 2223003122003222, 3530111333300000, 6212345678901232",
            "[card], [card], [card], [card], [card]",
        ),
        # Of SWIFT's registry: an example of each length and grouping.
        ("IBAN:DE89370400440532013000, de89 3704 0044 0532 0130 00.", "IBAN:[iban], [iban]."),
        ("NO93 8601 1117 947 is mine, BE68 5390 0754 7034 hers", "[iban] is mine, [iban] hers"),
        ("GB29-NWBK-6016-1331-9268-19 AND GB29NWBK60161331926819", "[iban] AND [iban]"),
        ("ES91 2100 0418 4502 0005 1332 BANK OF 2026", "[iban] BANK OF 2026"),
        ("ref AB12 MT84 MALT 0110 0001 2345 MTLC AST0 01S too", "ref AB12 [iban] too"),
        ("NL91 ABNA 0417 1643 00 NO93 8601 1117 947", "[iban] [iban]"),
        (
            "账号RU0304452522540817810538091310419，ＮＯ９３８６０１１１１７９４７",
            "账号[iban]，[iban]",
        ),
        (
            "SSN 219-09-9999, (219\u201109\u20119999) and _219-09-9999_",
            "SSN [ssn], ([ssn]) and _[ssn]_",
        ),
        ("*ann@example.com*, ann@example.com-thanks", "*[email]*, [email]-thanks"),
        ("_by ann@example.com_, ivan@xn--e1afmkfd.xn--p1ai", "_by [email]_, [email]"),
        ("8.8.8.8_, _8.8.8.8_, __2001:db8::17__", "[ip]_, _[ip]_, __[ip]__"),
        ("_+49 30 1234567_ _(212) 555-0100_ _030 901820_", "_[phone]_ _[phone]_ _[phone]_"),
        ("_AKIAIOSFODNN7EXAMPLE_ _sk-" + "a1B2" * 8 + "_", "_[key]_ _[key]"),
        ("from 192.0.2.17 and 2001:db8::17.", "from [ip] and [ip]."),
        ("10.0.0.7, 2a00:1450:4001::8a, fe80::1%eth0, fd12:3456::1", "[ip], [ip], [ip]%eth0, [ip]"),
        ("use sk-" + "a1B2" * 8 + " now", "use [key] now"),
        ("AKIAIOSFODNN7EXAMPLE", "[key]"),
        ("ghp_" + "a" * 36, "[key]"),
        ("sk-ant-api03-AbCd12_3456-7890abcdefghijKLMNOP_qrstuv-AA, then", "[key], then"),
        ("sk-proj-Ab3dE_fGh1jKl-Mn0pQrSt_UvWx", "[key]"),
        ("Authorization: Bearer 9f86d081884c7d659a2f", "Authorization: Bearer [key]"),
        ("npm_" + "a1" * 18, "[key]"),
        ("pypi-AgEIcHlwaS5vcmc" + "CJDEy" * 8 + ", r8_" + "a1" * 18, "[key], [key]"),
        (
            "gsk_" + "aB1" * 17 + " xai-" + "aB1" * 27 + " GOCSPX-" + "a-B_1" * 5,
            "[key] [key] [key]",
        ),
        ("dckr_pat_" + "aB-1" * 7 + " whsec_" + "aB1+" * 8, "[key] [key]"),
        ("dop_v1_" + "0a" * 32 + " ya29.a0" + "Ab_1" * 9 + " SK" + "0a" * 16, "[key] [key] [key]"),
        (
            "sean.o'brien@example.org, 'ann@example.org', d\u2019a@example.org",
            "[email], '[email]', [email]",
        ),
        (
            f"my -----BEGIN RSA PRIVATE KEY-----\nMIIE{'x' * 40}\n-----END RSA PRIVATE KEY-----",
            "my [key]",
        ),
        ("-----BEGIN PRIVATE KEY-----\nMIIE" + "x" * 40, "[key]"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeK", "[key]"),
        # A header may hold certificates, and a word more than a key.
        (f"eyJ{'x5cA' * 3000}.eyJzdWIiOiIx.SflKxwRJSMeK", "[key]"),
        ("jwt--_eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeK", "jwt--_[key]"),
        ("my__sk-" + "a1B2" * 8 + ", a--_pk_" + "a_" * 400 + "1B", "my__[key], a--_[key]"),
        ("اتصل +٤٩ ١٧٠ ١٢٣٤٥٦٧ الآن", "اتصل [phone] الآن"),
        ("۱۹۲.۱۶۸.۱.۲ ۲۱۹-۰۹-۹۹۹۹ 𝟐𝟏𝟗-𝟎𝟗-𝟗𝟗𝟗𝟗", "[ip] [ssn] [ssn]"),
        ("ann\u00ad.lee@exam\u00adple.org", "[email]"),
        ("8.8.8.8 or 4111\u200b1111\u20601111\ufeff1111", "[ip] or [card]"),
        (
            "Ann,123-45-6789,+49 30 12345678,Berlin\nBob,219-09-9999,(415) 555-2671,10115",
            "Ann,[ssn],[phone],Berlin\nBob,[ssn],[phone],10115",
        ),
        (
            "Ann,123-45-6789,1980-01-01\nBob,+49 30 12345678,10115",
            "Ann,[ssn],1980-01-01\nBob,[phone],10115",
        ),
        (
            "Tel.+49 30 1234567, Tél.01 23 45 67 89, тел.+7 495 123-45-67",
            "Tel.[phone], Tél.[phone], тел.[phone]",
        ),
        (
            "+49 30 1234567/+49 171 1234567, +14155552671,+14155552672",
            "[phone]/[phone], [phone],[phone]",
        ),
        ("in aversion 192.0.2.17, Subversion: 192.0.2.17", "in aversion [ip], Subversion: [ip]"),
    ],
)
def test_what_identifies_people_becomes_a_mark(text: str, cleaned: str) -> None:
    found, counts = redact(text)
    assert found == cleaned
    assert sum(counts.values()) == cleaned.count("[")


@pytest.mark.parametrize(
    "text",
    [
        "In 1999-2024 it cost $1,299.99, then 1.299,99 €; 3.14159265358979 is pi",
        "version 1.2.3, at 10:30:00, on 2024-01-31T10:00:00Z, rows 10-20, 127.0.0.1 and ::",
        "4111 1111 1111 1112 is no card, 1234567890123456 neither, 0000000000000000 too",
        "(2024) 100 people; +5 points; 5+3=8; a @ b; @ann; std::vector; 1/2; -273.15",
        "order 20240131000123, id 550e8400-e29b-41d4-a716-446655440000, sk-learn, task_key",
        "bearer of glad-tidings-from-the-hills, sk-learn-is-a-library-for-people",
        "10 20 30 40 50, 100 200 3000, 12/31/2024 10 000 000, 2024-01-31 100, 9781402894626",
        "1.2.3.4.5 and 999.1.1.1 and dead:beef",
        "a screen of 100-200x300, 2025-1920x1080, 请@小明.谢谢大家 and xapp-1-draft",
        "am 02.07.1998 08:32 und 02.07.1998 08 Uhr, 2.7.1998 10:00, 0.1666666667 each",
        "icon@2x.png, pypi-mirror, ya29.x, SKU 12, ACCOUNT, gsk_build, whsec_key",
        "lib_1.2.3.4_all, a_4111111111111111_b, task_sk-" + "a1B2" * 8,
        " ".join(map(str, range(1, 60))),
        " ".join(map(str, range(1960, 2060))),
        "41111111111111112024 1 and 4111 1111 1111 11112 0",  # within a longer group
        "le prix est de 1\u202f299\u202f000\u00a0€, 1990\u20132024, 10\u201320\u00a0%",
        "型番4111111111111112、2024年01月31日10:30:00、価格は１２３４５６７８円です",
        "git@github.com:shop/kettle.git, react@18.2.0, pk_customerorderitems, version 1.2.3.4",
        "a[1::2] + a[::2], abc::def, dead::beef, mask 255.255.255.0, 239.1.1.1 and ff02::1",
        # Another check digit, too short, too long, in another grouping, no such country.
        "DE88370400440532013000, DE8937040044053201300, DE89 3704 0044 0532 0130 001",
        "xDE89370400440532013000, NO93-8601 1117 947, XX93 8601 1117 947, BE68, sha DE89",
        "000-12-3456, 666-12-3456, 900-12-3456, 219-00-9999, 219-09-0000, 219099999, 219 09 9999",
        "order 1-219-09-9999, A219-09-9999, 219-09-9999-1, 219-09-99990, 2019-09-9999",
        "في ٣١.١٢.٢٠٢٤ بسعر ١٢٣٤٥٦٧, ភាសា\u200bខ្មែរ, Donau\u00addampf\u00adschiff 12",
        "Das Budget stieg um +1.250.000 Euro, le solde : +1 250 000 €, +10 000 000 new users",
        "yields +1.2345678, +0.1234567 a day at UTC +0200 2024; 0.1234567, 1.234.212-555-0188",
        "Versión: 2.4.1.0, версия 2.4.1.0, 版本 2.4.1.0, バージョン2.4.1.0, Kapitel 3.2.1.4",
        "VERSION 1.2.3.4, Version: 1.2.3.4, chapter 2.3.1.4, § 3.1.2.4",
        # Luhn's sum is right in all of these, and no card begins so or is as long.
        "at 20241210023335, order 2024121002333500, EAN 5901234123457 and 5039621723215",
    ],
)
def test_ordinary_numbers_and_words_stay(text: str) -> None:
    assert redact(text) == (text, {})


@pytest.mark.parametrize(
    ("region", "text"),
    [
        ("ES", "llama al 912 34 56 78"),
        ("NL", "bel 020 123 4567"),
        ("IT", "chiama 06 6988 3145"),
        ("IN", "call 098765 43210"),
        ("HU", "hívd: (06 1) 345 6789"),
        ("US", "ring 212 555 0100"),
    ],
)
def test_a_number_dialled_at_home_is_one_where_its_region_is_named(region: str, text: str) -> None:
    words = text[: re.search(r"[(0-9]", text).start()]  # type: ignore[union-attr]
    assert redact(text, (region,)) == (f"{words}[phone]", {"phone": 1})
    elsewhere = "GB" if region == "US" else "US"
    assert redact(text, (elsewhere,)) == (text, {})
    assert redact(text, ()) == (text, {})
    assert redact("+34 912 34 56 78 and +31 20 123 4567", ())[0] == "[phone] and [phone]"


def test_regions_nobody_knows_are_refused_by_name() -> None:
    assert FeedbackSettings().phone_regions == NATIONAL
    assert unknown_regions(NATIONAL) == []
    assert FeedbackSettings(phone_regions=("ES",)).phone_regions == ("ES",)
    for unfit in ("XX", "es", "ESP"):
        with pytest.raises(ValueError, match=f"found {unfit}; name others"):
            FeedbackSettings(phone_regions=("ES", unfit))


@given(st.floats(-1e6, 1e6).map(lambda x: f"{x:,.2f}") | st.integers(0, 10**9).map(str))
def test_a_number_stays(number: str) -> None:
    for text in (number, f"it costs ${number}.", f"{number}%", f"({number})"):
        assert redact(text) == (text, {})


@given(st.text("ab1234567890.:-+@()[] _/邮\u00a0\u2011１٢\u200b\u00ad", max_size=60))
def test_cleaning_twice_is_cleaning_once(text: str) -> None:
    once, _ = redact(text)
    assert redact(once) == (once, {})


@pytest.mark.parametrize(
    "piece",
    [
        "a@",
        "1.",
        "1-",
        "a.",
        "+1(",
        ":",
        "sk_a_",
        "a@a.",
        "1 ",
        "012 345 ",
        "4111 1111 ",
        "4111 1111 1111 1112 3",
        "4",
        "_4",
        "a@xn--",
        "邮",
        "邮a",
        "邮1 ",
        "邮@邮.",
        "+1\u00a0",
        "-----BEGIN PRIVATE KEY-----",
        "de89",
        "DE89 ",
        "DE89 3704 0044 0532 0130 0 ",
        "_DE89-",
        "219-09-",
        "666-12-3456-",
        "+491701234567",
        "+123-45-6789",
        "(212) 555-0123",
        "AIza" + 34 * "-" + "_",
    ],
)
def test_long_texts_of_one_piece_take_no_time(piece: str) -> None:
    redact("call 020 7946 0958")  # what is imported for it takes longer
    started = time.process_time()
    redact(piece * (20_000 // len(piece)))
    redact(piece * (20_000 // len(piece)) + "x")
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    "piece",
    [
        "__pk",
        "__rk-",
        "__sk-a-",
        "-_sk-",
        "__sk-aaaaaaaaaaaaaaa-",
        "__sk-A",
        "__sk-1",
        "__pk1",
        "__pk\u200b",
        "__eyJ",
        "__eyJaaaaaaaa",
        "__SG.__",
        "__glpat-",
        "Bearer a",
    ],
)
def test_four_times_the_text_takes_about_four_times_the_time(piece: str) -> None:
    """Sixteen times, where each of many keys that may begin in a word looks at all of the rest."""

    def seconds(signs: int) -> float:
        took = []
        for _ in range(3):
            started = time.process_time()
            redact(piece * (signs // len(piece)))
            took.append(time.process_time() - started)
        return min(took)

    assert seconds(80_000) < 8 * seconds(20_000)


def test_a_text_of_many_other_numbers_takes_no_time() -> None:
    """Each looks like one that is dialled, and asking whether it is takes milliseconds."""
    redact("call 020 7946 0958")
    started = time.process_time()
    redact("; ".join(f"(0{n})379-67. 09" for n in range(200, 2000)))
    assert time.process_time() - started < 2


def test_what_shows_more_however_often_it_is_looked_at_goes_as_a_whole() -> None:
    text = 30 * "+491701234567"
    assert redact(text)[0] == "[details]"
    assert redact(f"{2 * '+491701234567'}!") == ("[phone][phone]!", {"phone": 2})


def test_many_numbers_that_are_none_stay_beside_something_that_goes() -> None:
    table = "; ".join(f"12.5{n:03} 33.17" for n in range(150))
    assert redact(f"{table} a@b.co")[0] == f"{table} [email]"
