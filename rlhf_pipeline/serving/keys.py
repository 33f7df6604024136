"""API keys: who may use the service, as what, and for how long.

A key is shown once, when it is made; kept is its SHA-256 (of 256 random bits, which needs no slow
hash), in `access/keys.json` of the state folder, readable by its owner alone. What this does not
protect against: somebody who reads the state folder while it runs holds the feedback itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

from rlhf_pipeline import files
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.feedback.rules import check_agent_id
from rlhf_pipeline.records import hashed, now

Role = Literal["client", "admin"]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is kept of a key."""

    key_id: str  # public: stands in the key, in lists and in logs
    sha256: str  # of the whole key
    role: Role
    agent_id: str | None  # None: every agent
    name: str  # whom or what it is for
    created_at: str  # ISO 8601, UTC; so are the next two
    expires_at: str | None
    revoked_at: str | None = None

    @property
    def holds(self) -> bool:
        """Say whether it opens anything at this moment."""
        late = self.expires_at is not None and datetime.fromisoformat(self.expires_at) <= now()
        return self.revoked_at is None and not late


class Keys:
    """The keys of one state folder; another process's changes count at the next look."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = state_dir / "access"
        self._path = self.folder / "keys.json"
        self._seen: tuple[tuple[int, int, int], dict[str, ApiKey]] | None = None

    def create(
        self,
        role: Role,
        *,
        agent_id: str | None = None,
        name: str = "",
        expires_at: datetime | None = None,
    ) -> tuple[ApiKey, str]:
        """Return a new key's record and the key itself, which nobody can be shown again.

        Raises ConfigError for an admin key of one agent, FeedbackRefused for no agent's id.
        """
        if role == "admin" and agent_id is not None:
            raise ConfigError(
                f"an admin key is for every agent, found agent {agent_id!r}; leave the agent "
                "out or make a client key"
            )
        if agent_id is not None:
            check_agent_id(agent_id)
        key_id = secrets.token_hex(6)
        secret = f"rlhf_{key_id}_{secrets.token_urlsafe(32)}"
        ends = None if expires_at is None else expires_at.isoformat()
        made = ApiKey(key_id, hashed(secret), role, agent_id, name, now().isoformat(), ends)
        with self._changing() as known:
            known[key_id] = made
        return made, secret

    def revoke(self, key_id: str) -> None:
        """Make a key open nothing any more. Raises ConfigError where there is none."""
        if key_id not in self.all():  # none ever goes; asked in another folder, this makes none
            raise ConfigError(
                f"needed the id of a key, found {key_id!r}; `rlhf keys list` shows them"
            )
        with self._changing() as known:
            known[key_id] = replace(known[key_id], revoked_at=now().isoformat())

    def all(self) -> dict[str, ApiKey]:
        """Return every key there ever was, by id, oldest first. Raises PipelineError if damaged."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return {}
        look = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if self._seen is None or self._seen[0] != look:
            self._seen = (
                look,
                {row["key_id"]: ApiKey(**row) for row in files.read_json(self._path)},
            )
        return self._seen[1]

    def find(self, secret: str) -> ApiKey | None:
        """Return the record of a key that holds, or None."""
        parts = secret.split("_", 2)
        found = self.holding(parts[1]) if len(parts) == 3 else None
        if found is None or not hmac.compare_digest(found.sha256, hashed(secret)):
            return None
        return found

    def holding(self, key_id: str) -> ApiKey | None:
        """Return the record of the key with this id if it holds, or None."""
        found = self.all().get(key_id)
        return found if found is not None and found.holds else None

    def signing_secret(self) -> bytes:
        """Return the 32 bytes that sign tokens and cookies; made once."""
        path = self.folder / "secret"
        self._make_folder()
        if not path.exists():
            aside = self.folder / f".secret.{secrets.token_hex(6)}"
            files.write_bytes(aside, secrets.token_bytes(32))
            aside.chmod(0o600)
            with contextlib.suppress(FileExistsError):  # another process was first: its one holds
                os.link(aside, path)
            aside.unlink()
        found = path.read_bytes()
        if len(found) != 32:
            raise ConfigError(
                f"needed 32 bytes in {path}, found {len(found)}; remove it to sign with another"
            )
        return found

    @contextmanager
    def _changing(self) -> Iterator[dict[str, ApiKey]]:
        """Yield the keys; what the block leaves in them is kept. One process at a time."""
        self._make_folder()
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            known = dict(self.all())
            yield known
            files.write_json(self._path, [asdict(key) for key in known.values()])
            self._path.chmod(0o600)  # and the folder was closed to others before
        finally:
            os.close(descriptor)

    def _make_folder(self) -> None:
        files.make_private(self.folder.parent)
        files.make_private(self.folder)
        self.folder.chmod(0o700)
