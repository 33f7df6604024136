"""Whom nothing but a cookie knows: the networks that they come from."""

from __future__ import annotations

import pytest

from rlhf_pipeline.serving.pages.visitors import Visitors

VISITORS = Visitors(b"s" * 32)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("8.8.8.8", "8.8.8.8", True),
        ("8.8.8.8", "8.8.8.9", False),
        ("8.8.8.8", "::ffff:8.8.8.8", True),
        ("2a00:1450:4001::1", "2a00:1450:4001:ffff::2", True),
        ("2a00:1450:4001::1", "2a00:1450:4002::1", False),
    ],
)
def test_an_address_is_one_network_and_a_line_with_many_addresses_too(
    one: str, other: str, alike: bool
) -> None:
    assert (VISITORS.network(one) == VISITORS.network(other)) is alike


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "::1",
        "10.1.2.3",
        "172.17.0.1",
        "192.168.0.9",
        "100.64.0.1",
        "fd00::1",
        "testclient",
        "",
    ],
)
def test_what_is_none_of_the_internets_is_no_network(address: str) -> None:
    """A proxy that does not say whom it asks for would make one of everybody."""
    assert VISITORS.network(address) is None


def test_a_mark_does_not_tell_the_address_to_who_has_not_the_secret() -> None:
    mark, another = VISITORS.network("8.8.8.8"), Visitors(b"t" * 32).network("8.8.8.8")
    assert mark is not None
    assert "8.8.8.8" not in mark
    assert mark != another
