"""Whose a request is: API keys stand for tenants, and so do subjects of the NATS API.

Requests of two tenants never share KVCache, cannot cancel each other, and do not see each other's names. The body may
name its tenant only where its sender may speak for any: an HTTP client of a frontend without keys, a key of
ALL_TENANTS, a client on NATS whose credentials are no one tenant's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from halfmoon.schemas import subjects
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import ApiRequest

#: In place of a tenant's name: the sender may speak for any.
ALL_TENANTS = "*"
KEY_CHARACTERS_MIN = 16
_TENANT = re.compile(r"[^\s*]{1,128}")


def in_the_name_of(ask: ApiRequest, tenant: str) -> ApiRequest:
    """`ask` as its sender's tenant has it. Raises ApiError 403 when it names another."""
    if tenant == ALL_TENANTS:
        return ask
    if ask.tenant not in ("", tenant):
        raise ApiError(
            403, "tenant: not the one that the sender is known as", param="tenant", code="not_your_tenant"
        )
    return ask if ask.tenant == tenant else dataclasses.replace(ask, tenant=tenant)


def inboxes_of(tenant: str, inboxes: tuple[str, ...]) -> tuple[str, ...]:
    """How the inboxes of a tenant's clients begin: nobody else may listen there. `inboxes`: those of any client."""
    return tuple(f"{prefix}{tenant}." for prefix in inboxes) if tenant else inboxes


def tenant_of_subject(subject: str) -> str:
    """Who a request on `subject` speaks for. Raises ApiError 403."""
    tenant = subjects.tenant_of(subject)
    if tenant and not re.fullmatch(subjects.TENANT, tenant):
        raise ApiError(403, "that is no tenant's subject", code="not_your_tenant")
    return tenant or ALL_TENANTS


class ApiKeys:
    """Keys of HTTP clients: `tenant_of` one. Holds digests under a secret of this process, never the keys."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._secret = os.urandom(32)
        self._tenants = {self._digest(key.encode()): tenant for key, tenant in keys.items()}
        #: Some key is one tenant's: then what shows all tenants is for keys of ALL_TENANTS only.
        self._apart = any(tenant not in ("", ALL_TENANTS) for tenant in keys.values())

    def tenant_of(self, authorization: str) -> str:
        """The tenant of `Authorization: Bearer KEY`; ALL_TENANTS where no keys are. Raises ApiError 401."""
        if not self._tenants:
            return ALL_TENANTS
        scheme, _, key = authorization.partition(" ")
        # A digest that nobody can compute outside: how long looking it up takes says nothing of any key.
        digest = self._digest(key.strip().encode(errors="surrogateescape"))
        tenant = self._tenants.get(digest) if scheme.lower() == "bearer" else None
        if tenant is None:
            raise ApiError(401, "no valid API key (Authorization: Bearer ...)", code="invalid_api_key")
        return tenant

    def check_sees_all(self, authorization: str) -> None:
        """For what shows requests of every tenant. Raises ApiError 401, 403."""
        tenant = self.tenant_of(authorization)
        if tenant != ALL_TENANTS and (tenant or self._apart):
            message = f"this key is one tenant's; the page shows all (a key of {ALL_TENANTS!r} may see it)"
            raise ApiError(403, message, code="not_for_tenants")

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, hashlib.sha256)


def read_keys(file: str) -> dict[str, str]:
    """Keys and their tenants from the lines of `file`: `KEY` (of the default tenant, ""), `TENANT KEY`, `* KEY`.

    What follows ` #` says nothing. Raises OSError, and ValueError with the line's number
    (never its text); also when others than the owner and its group may read the file, or others than the owner may
    write it.
    """
    path = Path(file)
    with path.open("rb") as source:
        status = os.fstat(source.fileno())
        if status.st_mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
            raise ValueError(
                f"{file}: mode {stat.S_IMODE(status.st_mode):04o}: not for others to read or write (0600)"
            )
        if status.st_uid not in (0, os.geteuid()):
            raise ValueError(f"{file}: belongs to another user")
        content = source.read()
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError as problem:
        raise ValueError(f"{file}: no UTF-8 at byte {problem.start}") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = f" {line}".partition(" #")[0].split()
        if not words:
            continue
        tenant, key = ("", words[0]) if len(words) == 1 else (words[0], words[-1])
        where = f"{file}: line {number}"
        if len(words) > 2 or (tenant not in ("", ALL_TENANTS) and not _TENANT.fullmatch(tenant)):
            raise ValueError(f"{where}: KEY, or TENANT KEY")
        if len(key) < KEY_CHARACTERS_MIN or not key.isascii():
            raise ValueError(
                f"{where}: a key has at least {KEY_CHARACTERS_MIN} characters, all of them ASCII"
            )
        if key in keys:
            raise ValueError(f"{where}: this key stands there twice")
        keys[key] = tenant
    if not keys:
        raise ValueError(f"{file}: there is no key in it")
    return keys
