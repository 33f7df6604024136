"""What identifies people is taken out of texts before they are trained on.

E-mail addresses, phone numbers, payment cards (Luhn), bank accounts (IBAN, in one piece or in
fours), US social security numbers (123-45-6789: without the hyphens it may be any number), API keys
and tokens, IP addresses: each becomes a mark that says its kind, so the same text always gives the
same text, and a text that was cleaned stays as it is. Rules alone, no model, and for phone numbers
Google's libphonenumber: any country's with its code, and as they are dialled at home those of the
regions that are named (`feedback.phone_regions`). What this does not find is names, places, and
numbers written in words; other regions' numbers without their code; and those without a +, brackets
or separators, which may be any number.
"""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from collections.abc import Callable, Sequence

Counts = dict[str, int]
"""How many of each kind were found."""

PLAIN = str.maketrans(
    {
        **dict.fromkeys("\u00a0\u2007\u2008\u2009\u200a\u202f\u205f\u3000", " "),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63", "-"),
        **{chr(wide): chr(wide - 0xFEE0) for wide in range(0xFF01, 0xFF5F)},
        **{
            sign: str(unicodedata.decimal(sign))
            for sign in map(chr, range(0x20000))  # Unicode has none beyond
            if sign.isdecimal()
        },
    }
)
"""Blanks and hyphens that web pages, phones and models put inside numbers, so that no line ends
there, East Asia's wide digits and signs, and the digits of every script. Each is one sign, and so
is what it stands for.
"""
UNSEEN = re.compile("[\u00ad\u200b\u2060\ufeff]")
"""What shows nothing, and comes along with what is copied from a page: soft hyphens, places where
a line may end, or may not.
"""

# Letters of scripts with no blanks between words (Thai, Lao, Burmese, Khmer, Japanese, Chinese) or
# with endings that are written on to whatever they belong to (Korean).
RUN_ON = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    r"\uac00-\ud7af\uf900-\ufaff\uff66-\uff9f"
)
SIGN = rf"[^\W{RUN_ON}]"  # of a word: a letter, a digit or _
LETTER = rf"[^\W_{RUN_ON}]"  # or a digit
# Around most of what is looked for: no letter and no digit, but the underscores of emphasis.
BEFORE = rf"(?<!{LETTER})(?<!{LETTER}_)"
AFTER = rf"(?!_?{LETTER})"

# Countries and domains with names in such letters, where a text may go on without a blank. Source:
# IANA's root zone, https://www.iana.org/domains/root/db
RUN_ON_DOMAINS = (
    "中国 中國 台湾 台灣 香港 澳門 澳门 新加坡 한국 ไทย ລາວ 公司 公益 商城 商标 在线 集团 "
    "网络 网址 网站 中文网 我爱你 游戏 移动 政务 组织机构 みんな コム ストア クラウド グーグル "
    "닷컴 닷넷 삼성 คอม"
).replace(" ", "|")
EMAIL = re.compile(
    rf"(?:(?<!{SIGN})(?<![.+-])(?!git@)(?:{SIGN}|[.+-]|(?<={LETTER})['\u2019](?={LETTER})){{1,64}}"
    rf"|[{RUN_ON}]{{1,64}})@(?![1-9]x\.(?:png|jpe?g|gif|webp))"  # icon@2x.png is a file
    rf"(?:[\w{RUN_ON}-]{{1,63}}\.){{1,8}}"  # whose vowels may be no \w
    rf"(?:(?:[Xx][Nn]--[A-Za-z0-9-]{{1,59}}|[^\W\d_{RUN_ON}]{{2,24}})(?!{LETTER})|{RUN_ON_DOMAINS})"
)
# Many keys may begin within one word (__pk__pk__pk), so none of them looks at all that is left of
# it: among MOST_LOOKED_AT random signs there are a digit and a capital.
MOST_LOOKED_AT = 1000
DIGITS_IN = rf"(?=[A-Za-z_-]{{0,{MOST_LOOKED_AT}}}+[0-9])"
CAPITALS_IN = rf"(?=[a-z0-9_-]{{0,{MOST_LOOKED_AT}}}+[A-Z])"
SECRET = (  # primary keys of tables are called pk_customerorderitems
    rf"(?:sk|(?:pk|rk){DIGITS_IN})[-_](?:"
    r"(?:[A-Za-z0-9]{1,12}[-_])*[A-Za-z0-9]{16,}[A-Za-z0-9_-]*"
    rf"|{DIGITS_IN}{CAPITALS_IN}[A-Za-z0-9_-]{{20,}})"
)
# The header of a JSON Web Token may hold certificates: at a word's beginning it has any length.
HEADER = rf"eyJ(?:(?<![\w-]eyJ)[\w-]{{8,}}+|[\w-]{{8,{MOST_LOOKED_AT}}}+)"
KEY = re.compile(
    rf"{BEFORE}(?<!-)(?:{SECRET}"
    + r"""
        | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_\w{20,} | glpat-[\w-]{20,}
        | hf_[A-Za-z0-9]{20,} | xox[abposr]-[A-Za-z0-9-]{10,}
        | xapp-[0-9]-[A-Za-z0-9-]{20,}
        | (?:AKIA|ASIA)[A-Z0-9]{16} | AIza[\w-]{35}
        | npm_[A-Za-z0-9]{36} | SG\.[\w-]{16,}\.[\w-]{16,}
        | (?:gsk_|xai-)[A-Za-z0-9]{40,} | r8_[A-Za-z0-9]{30,} | do[opr]_v1_[0-9a-f]{64}
        | pypi-[\w-]{40,} | dckr_pat_[\w-]{20,} | whsec_[A-Za-z0-9+/]{20,}=*
        | GOCSPX-[\w-]{20,} | ya29\.[\w-]{20,} | (?:AC|SK)[0-9a-f]{32}
        | (?<=[Bb]earer\ )(?=[^\s]*[0-9])[\w.~+/-]{20,}=*
        | rlhf_[0-9a-f]{12}_[\w-]{43}
        | """
    + rf"{HEADER}\.[\w-]{{8,}}\.[\w-]{{8,}})(?![A-Za-z0-9])",
    re.VERBOSE | re.ASCII,
)
PRIVATE = "[A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----"  # PGP's is a block
PRIVATE_KEY = re.compile(  # one that breaks off is one to the end of the text
    rf"-----BEGIN {PRIVATE}.*?(?:-----END {PRIVATE}|\Z)",
    re.DOTALL,
)
GROUPS = r"(?=(?:[ -]?\d){13})\d+(?:[ -]\d+)*"  # all digits in a row: a card may be among them
CARD = re.compile(rf"{BEFORE}(?<!\.){GROUPS}{AFTER}(?!\.\d)")
ISSUED = re.compile(  # by whom: how a card's number begins, and how many digits it has
    r"4(?:\d{12}|\d{15}|\d{18})"  # Visa
    r"|5[1-5]\d{14}|(?:22[2-9]|2[3-6]\d|27[01])\d{13}|2720\d{12}"  # Mastercard
    r"|3[47]\d{13}|3[0689]\d{12,17}|35\d{14,17}"  # American Express, Diners Club, JCB
    r"|(?:5[0678]|6\d)\d{14,17}"  # Maestro, Discover, UnionPay and others
)
CARD_SHAPES = ((4, 4, 4, 4, 3), (4, 4, 4, 4), (4, 6, 5), (4, 6, 4))  # digits in each group
CARD_DIGITS = range(13, 20)  # in a card's number
IBAN_BEGUN = re.compile(rf"{BEFORE}[A-Za-z]{{2}}[0-9]{{2}}")
IBAN = re.compile(  # signs in fours: an account may be among them, or all of them
    rf"{IBAN_BEGUN.pattern}([ -]?)(?:[A-Za-z0-9]{{4}}\1){{2,}}[A-Za-z0-9]{{0,4}}{AFTER}"
)
IBAN_COUNTRIES = {  # signs -> who has so many, by SWIFT's registry of ISO 13616
    15: "NO",
    16: "BE",
    18: "DK FI FK FO GL NL SD",
    19: "MK SI",
    20: "AT BA EE KZ LT LU MN XK",
    21: "CH HR LI LV",
    22: "BG BH CR DE GB GE IE ME RS VA",
    23: "AE GI IL IQ OM SO TL",
    24: "AD CZ ES MD PK RO SA SE SK TN VG",
    25: "LY PT ST",
    26: "IS TR",
    27: "BI DJ FR GR IT MC MR SM",
    28: "AL AZ BY CY DO GT HN HU LB NI PL SV",
    29: "BR EG PS QA UA",
    30: "JO KW MU YE",
    31: "MT SC",
    32: "LC",
    33: "RU",
}
IBAN_SIGNS = {one: signs for signs, some in IBAN_COUNTRIES.items() for one in some.split()}
# Not within a longer number. A point, comma or slash after a word, or a cell, is the word's.
NO_DIGITS_BEFORE = rf"{BEFORE}(?<![+-])(?<![0-9][.,/])"
SSN = re.compile(  # but for what was never given out
    rf"{NO_DIGITS_BEFORE}(?!000|666|9)[0-9]{{3}}-(?!00)[0-9]{{2}}-(?!0000)[0-9]{{4}}"
    rf"{AFTER}(?![.-][0-9])"
)
IN_PARTS = (  # what has numbers of four parts, that are no addresses
    *("version", "versions", "release", "releases", "build", "firmware", "section", "sections"),
    *("chapter", "clause", "article", "kapitel", "abschnitt", "versionen", "versie", "versione"),
    *("versión", "versiones", "sección", "capítulo", "versão", "seção", "chapitre", "wersja"),
    *("wersji", "verze", "verzió", "sürüm", "версия", "версии", "версию", "раздел"),
)
RUN_ON_PARTS = ("§", "版本", "版", "第", "バージョン", "버전")  # whatever stands before these
NUMBERED = "(?=[0-9])" + "".join(
    rf"(?<!{word}{between})"
    for word in (*(rf"\b(?i:{one})" for one in IN_PARTS), *RUN_ON_PARTS)
    for between in ("", " ", ":", ": ")
)
IP4 = re.compile(rf"{BEFORE}(?<!\.){NUMBERED}(?:[0-9]{{1,3}}\.){{3}}[0-9]{{1,3}}{AFTER}(?!\.[0-9])")
IP6 = re.compile(
    rf"{BEFORE}(?<![:.])(?=[0-9A-Fa-f]{{0,4}}:[0-9A-Fa-f]{{0,4}}:)[0-9A-Fa-f:]{{2,39}}{AFTER}(?!:)"
)
PHONE = re.compile(
    NO_DIGITS_BEFORE
    + r"""(?:
        \+[0-9](?:[ ./-]?(?:\([0-9]{1,4}\)[ ]?)?[0-9]){6,13}  # +49 30 123456, +1 (212) 555-0100
        | \([0-9]{2,5}\)[ ]?[0-9]{3,4}[ -][0-9]{3,4}          # (212) 555-0100
        | [2-9][0-9]{2}-[2-9][0-9]{2}-[0-9]{4}                # 212-555-0100
    )(?![.-][0-9])"""
    + rf"(?:{AFTER}|(?=(?:x|ext\.?)[0-9]{{1,6}}{AFTER}))",  # 212-555-0100x12
    re.VERBOSE,
)
DIALLED = re.compile(rf"{NO_DIGITS_BEFORE}[+(]?[0-9][0-9 ()./-]{{5,24}}[0-9]{AFTER}(?![.,-][0-9])")
NATIONAL = ("US", "GB", "DE", "FR")  # where people may leave their country's code out, if not said
NOT_DIALLED = re.compile(  # 31.12.2024 23 and 0.1666666667
    r"(?:0?[1-9]|[12][0-9]|3[01])\.(?:0?[1-9]|1[0-2])\.(?:19|20)[0-9]{2}(?![0-9])|0\.[0-9]+$"
)
MOST_GROUPS = 7  # of digits in a phone number: a row of many short ones is none
MOST_JUDGED = 200  # runs of digits of a text that libphonenumber is asked about, 3 ms each at most
MOST_LOOKS = 8  # at a text; what people write is clean at the second, or third
DIGITS = range(7, 16)  # in a phone number; ITU-T E.164 has 15 at most, with the country's code


def redact(text: str, regions: Sequence[str] = NATIONAL) -> tuple[str, Counts]:
    """Return the text with a mark like [email] for each find, and how many of each kind.

    `regions` (two letters, ISO 3166) are where a phone number may stand without its country's code.
    Nobody can write a text that takes long: one that shows more at each of MOST_LOOKS goes as a
    whole ([details]), and after MOST_JUDGED runs of digits that may be phone numbers others are.
    """
    cleaned, counts = _redacted(text, regions)
    if UNSEEN.search(cleaned):
        bare, more = _redacted(UNSEEN.sub("", cleaned), regions)
        if more:  # else it stays as it was written
            return bare, {kind: counts.get(kind, 0) + more.get(kind, 0) for kind in counts | more}
    return cleaned, counts


def _redacted(text: str, regions: Sequence[str]) -> tuple[str, Counts]:
    counts: Counts = {}
    judged: dict[str, bool] = {}

    def is_phone(run: str) -> bool:
        if not _may_be_phone(run):
            return False
        if run not in judged and len(judged) < MOST_JUDGED:
            judged[run] = _is_phone(run, regions)
        return judged.get(run, True)

    dialled: Rule = ("phone", r"\d", DIALLED, _whole(is_phone))
    for _ in range(MOST_LOOKS):  # what is taken out may have hidden something beside it
        before, text = text, _redact_once(text, counts, dialled)
        if text == before:
            return text, counts
    counts["details"] = 1
    return "[details]", counts


def _redact_once(text: str, counts: Counts, dialled: Rule) -> str:
    seen = plain(text)
    for kind, held, pattern, spans_in in (*RULES, dialled):
        if not re.search(held, seen):  # as in most texts, sooner than the pattern says so
            continue
        said, end = "", 0
        for found in pattern.finditer(seen):
            for start, stop in spans_in(found.group()):
                counts[kind] = counts.get(kind, 0) + 1
                said += f"{text[end : found.start() + start]}[{kind}]"
                end = found.start() + stop
        if end:
            text = said + text[end:]
            seen = plain(text)
    return text


def plain(text: str) -> str:
    """Return the text with plain signs in it (PLAIN): as long, and everything at its place."""
    return text if text.isascii() else text.translate(PLAIN)


def _whole(is_one: Callable[[str], bool]) -> Callable[[str], Sequence[Span]]:
    return lambda text: [(0, len(text))] if is_one(text) else []


def _always(_: str) -> bool:
    return True


def cards_in(run: str) -> list[Span]:
    """Return where cards' numbers are in groups of digits (GROUPS): the whole of it, or some.

    The whole may be grouped in any way. Among other numbers (a date, a code) a card's is a group of
    its own, or groups as they stand on cards: any others would make cards out of lists of numbers.
    """
    groups = [found.span() for found in re.finditer(r"\d+", run)]
    sizes = [stop - start for start, stop in groups]
    if sum(sizes) in CARD_DIGITS and _is_card(_digits(run)):
        return [(0, len(run))]
    found: list[Span] = []
    i = 0
    while i < len(groups):
        one = [(sizes[i],)] if sizes[i] in CARD_DIGITS else []
        for shape in (*one, *CARD_SHAPES):
            if tuple(sizes[i : i + len(shape)]) == shape:
                start, stop = groups[i][0], groups[i + len(shape) - 1][1]
                digits = _digits(run[start:stop])
                if _is_card(digits):
                    found.append((start, stop))
                    i += len(shape) - 1
                    break
        i += 1
    return found


def _digits(text: str) -> str:
    return "".join(str(int(sign)) for sign in text if sign.isdecimal())  # of any script


def _is_card(digits: str) -> bool:
    """Say whether the digits are a card's: its issuer's, not one sign alone, and Luhn's sum right.

    The sum is right by chance in one number out of ten: in moments, bar codes, order numbers.
    """
    issued = ISSUED.fullmatch(digits) is not None and len(set(digits)) > 1
    return issued and passes_luhn(digits)


def passes_luhn(digits: str) -> bool:
    """Say whether the last digit is the Luhn check digit (ISO/IEC 7812-1, annex B).

    Every second digit from the right is doubled, and all digits of that are summed.
    """
    numbers = [int(digit) for digit in reversed(digits)]
    return sum(sum(divmod(2 * n, 10)) if i % 2 else n for i, n in enumerate(numbers)) % 10 == 0


def ibans_in(run: str) -> list[Span]:
    """Return where accounts' numbers are in signs in fours (IBAN): each as long as its country's.

    The check digits are right by chance in one of 97.
    """
    found: list[Span] = []
    for begun in IBAN_BEGUN.finditer(run):
        signs = IBAN_SIGNS.get(begun[0][:2].upper())
        if signs is None or (found and begun.start() < found[-1][1]):
            continue
        whole = re.compile(rf"(?:[A-Za-z0-9][ -]?){{{signs - 1}}}[A-Za-z0-9]{AFTER}")
        if (number := whole.match(run, begun.start())) and passes_mod_97(number[0]):
            found.append(number.span())
    return found


def passes_mod_97(number: str) -> bool:
    """Say whether an IBAN's check digits are right (ISO 7064, MOD 97-10).

    What is before them and they themselves go to the end, and A to Z count as 10 to 35.
    """
    signs = re.sub(r"[^A-Za-z0-9]", "", number)
    return int("".join(str(int(sign, 36)) for sign in signs[4:] + signs[:4])) % 97 == 1


def is_somebodys_address(text: str) -> bool:
    """Say whether it is an IP address of somebody: loopback and 0.0.0.0 are nobody's.

    Nor is what was never given out: masks (255.255.255.0), and most of what looks like IPv6, as
    `a[1::2]` in Python and `abc::def` in C++ do.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    nobodys = address.is_loopback or address.is_unspecified or address.is_reserved
    return not (nobodys or address.is_multicast)


def unknown_regions(regions: Sequence[str]) -> list[str]:
    """Return those of the regions whose phone numbers nobody here knows."""
    import phonenumbers

    return [region for region in regions if region not in phonenumbers.SUPPORTED_REGIONS]


def _may_be_phone(text: str) -> bool:
    """Say whether a run of digits has as many, in as many groups, as a phone number may have."""
    groups = re.findall(r"[0-9]+", text)
    if len(groups) > MOST_GROUPS or (len(groups) == 1 and text[0] != "+"):
        return False
    return sum(map(len, groups)) in DIGITS and not NOT_DIALLED.match(text)


def is_as_long_as_its_countrys(text: str) -> bool:
    """Say whether a number with a + has as many digits as those of its country: +1.250.000 has not.

    Whether it was given out is not asked, so made up ones are found too.
    """
    import phonenumbers

    if not text.startswith("+"):
        return True
    try:
        number = phonenumbers.parse(text)
    except phonenumbers.NumberParseException:
        return False
    possible = phonenumbers.ValidationResult.IS_POSSIBLE
    return bool(phonenumbers.is_possible_number_with_reason(number) == possible)


def _is_phone(text: str, regions: Sequence[str]) -> bool:
    """Say whether a run of digits is somebody's number, grouped as it is there.

    By https://github.com/google/libphonenumber, in Python.
    """
    import phonenumbers

    first = text.lstrip("(")[0]
    # With its country's code a number is the same from everywhere.
    places = [None] if first == "+" else [one for one in regions if _may_begin(one, first)]
    return any(
        found.raw_string == text
        for region in places
        for found in phonenumbers.PhoneNumberMatcher(
            text, region, leniency=phonenumbers.Leniency.STRICT_GROUPING
        )
    )


def _may_begin(region: str, first: str) -> bool:
    """Say whether a number dialled within the region may begin so: most that dial a 0 always do."""
    import phonenumbers

    known = phonenumbers.PhoneMetadata.metadata_for_region(region)
    prefix = None if known is None else known.national_prefix
    return prefix is None or prefix.startswith("0") == (first == "0")


Span = tuple[int, int]
"""Where something begins in a text, and where it has ended."""

Rule = tuple[str, str, re.Pattern[str], Callable[[str], Sequence[Span]]]
"""A kind, what stands in every text with some, what may hold some, and where in that they are."""

RULES: tuple[Rule, ...] = (
    ("key", "-----BEGIN", PRIVATE_KEY, _whole(_always)),
    ("key", "", KEY, _whole(_always)),
    ("email", "@", EMAIL, _whole(_always)),
    ("iban", r"\d", IBAN, ibans_in),
    ("card", r"\d", CARD, cards_in),
    ("ip", r"\d", IP4, _whole(is_somebodys_address)),
    ("ip", ":", IP6, _whole(is_somebodys_address)),
    ("ssn", r"\d", SSN, _whole(_always)),
    ("phone", r"\d", PHONE, _whole(is_as_long_as_its_countrys)),
)
