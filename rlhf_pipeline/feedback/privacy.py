"""What identifies people is taken out of texts before they are trained on.

E-mail addresses, phone numbers, payment cards (Luhn), API keys and tokens, IP addresses: each
becomes a mark that says its kind, so the same text always gives the same text, and a text that was
cleaned stays as it is. Rules alone, no model: what this does not find is names, places, and numbers
written in words; and phone numbers without a +, brackets or separators, which may be any number.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

Counts = dict[str, int]
"""How many of each kind were found."""

EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[\w-]{1,63}\.){1,8}[^\W\d_]{2,24}(?![\w-])")
KEY = re.compile(
    r"""(?<![A-Za-z0-9_-])(?:
        (?:sk|pk|rk)[-_](?:[A-Za-z0-9]{1,12}[-_])*[A-Za-z0-9]{16,}
        | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_\w{20,} | glpat-[\w-]{20,}
        | hf_[A-Za-z0-9]{20,} | xox[abposr]-[A-Za-z0-9-]{10,}
        | (?:AKIA|ASIA)[A-Z0-9]{16} | AIza[\w-]{35}
        | eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}
        | rlhf_[0-9a-f]{12}_[\w-]{43}
    )(?![A-Za-z0-9])""",
    re.VERBOSE | re.ASCII,
)
CARD = re.compile(r"(?<![\w.])(?:[0-9][ -]?){12,18}[0-9](?![\w]|\.[0-9])")
IP4 = re.compile(r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![\w]|\.[0-9])")
IP6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f:]{2,39}(?![\w:])")
PHONE = re.compile(
    r"""(?<![\w.,+/-])(?:
        \+[0-9](?:[ ./-]?(?:\([0-9]{1,4}\)[ ]?)?[0-9]){6,13}  # +49 30 123456, +1 (212) 555-0100
        | \([0-9]{2,5}\)[ ]?[0-9]{3,4}[ -][0-9]{3,4}          # (212) 555-0100
        | [2-9][0-9]{2}-[2-9][0-9]{2}-[0-9]{4}                # 212-555-0100
    )(?![\w]|[.,-][0-9])""",
    re.VERBOSE,
)


def redact(text: str) -> tuple[str, Counts]:
    """Return the text with a mark like [email] for each find, and how many of each kind."""
    counts: Counts = {}
    for kind, pattern, is_one in RULES:

        def mark(
            found: re.Match[str],
            kind: str = kind,
            is_one: Callable[[str], bool] = is_one,
        ) -> str:
            if not is_one(found.group()):
                return found.group()
            counts[kind] = counts.get(kind, 0) + 1
            return f"[{kind}]"

        text = pattern.sub(mark, text)
    return text, counts


def _always(_: str) -> bool:
    return True


def _is_card(text: str) -> bool:
    """Say whether the digits are a card's: a known first digit, not one alone, and Luhn's sum."""
    digits = [c for c in text if c.isdigit()]
    return digits[0] in "23456" and len(set(digits)) > 1 and passes_luhn("".join(digits))


def passes_luhn(digits: str) -> bool:
    """Say whether the last digit is the Luhn check digit (ISO/IEC 7812-1, annex B).

    Every second digit from the right is doubled, and all digits of that are summed.
    """
    numbers = [int(digit) for digit in reversed(digits)]
    return sum(sum(divmod(2 * n, 10)) if i % 2 else n for i, n in enumerate(numbers)) % 10 == 0


def is_somebodys_address(text: str) -> bool:
    """Say whether it is an IP address of somebody: `::`, loopback and 0.0.0.0 are nobody's."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)


RULES: tuple[tuple[str, re.Pattern[str], Callable[[str], bool]], ...] = (
    ("key", KEY, _always),
    ("email", EMAIL, _always),
    ("card", CARD, _is_card),
    ("ip", IP4, is_somebodys_address),
    ("ip", IP6, is_somebodys_address),
    ("phone", PHONE, _always),
)
