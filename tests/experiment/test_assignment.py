"""Assignment: the same user, the same arm, everywhere; a ramp only moves people one way."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_pipeline.experiment.assignment import BUCKETS, arm_of, bucket_of, percent

SHARES = st.floats(0, 1)


@given(st.text(max_size=20), st.text(max_size=20), SHARES, SHARES)
def test_a_longer_ramp_never_takes_the_challenger_away(
    salt: str, user: str, one: float, other: float
) -> None:
    narrow, wide = sorted((one, other))
    if arm_of(salt, user, narrow) == "challenger":
        assert arm_of(salt, user, wide) == "challenger"


def test_buckets_are_even_and_another_salt_shuffles_them() -> None:
    users = 40_000
    counts = [0] * 20
    together = 0
    for n in range(users):
        first, second = bucket_of("one", f"user {n}"), bucket_of("two", f"user {n}")
        counts[first * 20 // BUCKETS] += 1
        together += (first < BUCKETS // 2) == (second < BUCKETS // 2)
    expected = users / 20
    chi_squared = sum((count - expected) ** 2 / expected for count in counts)
    assert chi_squared < 43.8  # 19 degrees of freedom, p = 0.001
    assert abs(together / users - 0.5) < 4 * 0.5 / users**0.5


def test_another_process_gives_the_same_arms() -> None:
    """Python's own hash differs between processes; this one must not."""
    code = (
        "from rlhf_pipeline.experiment.assignment import bucket_of\n"
        "print([bucket_of('salt', f'user {n}') for n in range(50)])"
    )
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert elsewhere.stdout.strip() == str([bucket_of("salt", f"user {n}") for n in range(50)])


def test_salt_and_user_cannot_run_into_each_other() -> None:
    assert bucket_of("ab", "c") != bucket_of("a", "bc")


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        arm_of("salt", "user", share)


def test_a_share_is_told_also_where_it_is_no_whole_number_of_per_cent() -> None:
    told = [percent(share) for share in (0.005, 0.01, 0.07, 0.29, 0.5)]
    assert told == ["0.5%", "1%", "7%", "29%", "50%"]
