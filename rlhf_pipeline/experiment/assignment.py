"""Who sees which arm: a hash of the experiment and the user, and nothing else.

No table is asked and no state is kept, so a restart, a second replica or a lost database gives
every user the arm they had. The challenger holds a prefix of the buckets; a ramp only lengthens
it, so people move from champion to challenger and never back while an experiment runs.

A browser without its cookie is a new user. As many of them as one cares to be come from few
networks, so of one network few count (`counted_as`), whatever their number.
"""

from __future__ import annotations

import hashlib
from typing import Literal

Arm = Literal["champion", "challenger"]

BUCKETS = 10_000


def bucket_of(salt: str, user_id: str) -> int:
    """Return the user's bucket in 0..9999, uniform over users and independent between salts."""
    digest = hashlib.sha256(f"{len(salt)}:{salt}{user_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % BUCKETS  # the remainder is even to 1 in 10^15


def arm_of(salt: str, user_id: str, challenger_share: float) -> Arm:
    """Return the arm of a user when the challenger has this share of all users, 0 to 1."""
    if not 0.0 <= challenger_share <= 1.0:
        raise ValueError(f"a share lies between 0 and 1, found {challenger_share}")
    reached = round(challenger_share * BUCKETS)
    return "challenger" if bucket_of(salt, user_id) < reached else "champion"


def percent(share: float) -> str:
    """Return a share as it is told to people, also where it is no whole number: 0.5%."""
    return f"{100 * share:g}%"


def counted_as(user_id: str, network: str | None, most: int | None) -> str:
    """Return as whom a user counts: of one network's there are `most`, who share its people.

    As themselves where no network is known, or none is to be told from another (`most` None).
    """
    if network is None or most is None:
        return user_id
    return f"{network} {bucket_of(network, user_id) % most}"
