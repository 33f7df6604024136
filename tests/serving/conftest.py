"""What the service does once as it starts, and tests of many services would do again and again."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Iterator

import pytest

from rlhf_pipeline.serving import champions


@pytest.fixture(scope="session", autouse=True)
def _once() -> Iterator[None]:
    """No search of all that is in memory after each model, no reading of certificates per call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(champions, "settle", lambda: None)
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield
