"""Every way to say who we are, against a real nats-server: right is taken, wrong is refused and says why."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nkeys
import pytest

from halfmoon.bus.connection import Bus, BusConfig
from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.bus.errors import BusUnreachable
from halfmoon.cli.certificates import make_authority, make_certificate
from halfmoon.schemas.events import RequestCancelled
from tests.eventually import BOUND_S

#: A refusal is said at once, not when the time to connect is over: a test that waited for that would not end.
CONNECT_S = 3600.0


async def takes(config: BusConfig) -> None:
    """The server takes us, and the log takes an event."""
    bus = await Bus.connect(replace(config, connect_timeout_s=BOUND_S), name="x")
    assert await bus.append(RequestCancelled(request_id="r"), source_id="f") >= 1
    await bus.close()


async def refuses(config: BusConfig, reason: str) -> None:
    with pytest.raises(BusUnreachable, match=reason) as caught:
        async with asyncio.timeout(BOUND_S):
            await Bus.connect(replace(config, connect_timeout_s=CONNECT_S), name="x")
    in_a_line(caught.value, config)


async def refuses_in_the_end(config: BusConfig, reason: str) -> None:
    """A server that ends the connection may be one that starts: it is asked until the time to connect is over. Where
    that passed before there was any answer, there is more of it.
    """
    for connect_s in (1, 4, 16, 64):
        with pytest.raises(BusUnreachable) as caught:
            await Bus.connect(replace(config, connect_timeout_s=connect_s), name="x")
        if re.search(reason, str(caught.value)):
            break
    assert re.search(reason, str(caught.value))
    in_a_line(caught.value, config)


def in_a_line(problem: BusUnreachable, config: BusConfig) -> None:
    assert "\n" not in str(problem)
    assert config.url.removeprefix("tls") in str(problem) or "TLS" in str(problem)


def key(prefix: int) -> nkeys.KeyPair:
    return nkeys.from_seed(nkeys.encode_seed(secrets.token_bytes(32), prefix))


def public(pair: nkeys.KeyPair) -> str:
    return bytes(pair.public_key).decode()


# --- in the clear -------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    """With the configuration that the test names."""
    server = EmbeddedServer.start(tmp_path / "nats", extra_config=request.param)
    yield server
    server.stop()


@pytest.mark.parametrize("server", ['authorization { token: "full-moon" }'], indirect=True)
async def test_a_token(server: EmbeddedServer) -> None:
    await takes(BusConfig(url=server.url, token="full-moon"))
    await refuses(BusConfig(url=server.url, token="new-moon"), "Authorization Violation")
    await refuses(BusConfig(url=server.url), "Authorization Violation")


@pytest.mark.parametrize("server", ["authorization { user: moon, password: light }"], indirect=True)
async def test_a_user_and_a_password(server: EmbeddedServer) -> None:
    await takes(BusConfig(url=server.url, user="moon", password="light"))
    await refuses(BusConfig(url=server.url, user="moon", password="dark"), "Authorization Violation")
    await refuses(BusConfig(url=server.url, user="sun", password="light"), "Authorization Violation")


async def test_an_nkey(tmp_path: Path) -> None:
    ours, other = key(nkeys.PREFIX_BYTE_USER), key(nkeys.PREFIX_BYTE_USER)
    for name, pair in (("ours", ours), ("other", other)):
        (tmp_path / name).write_bytes(bytes(pair.seed))
    users = f"authorization {{ users: [ {{ nkey: {public(ours)} }} ] }}"
    server = EmbeddedServer.start(tmp_path / "nats", extra_config=users)
    try:
        config = BusConfig(url=server.url, nkey_seed_file=str(tmp_path / "ours"))
        await takes(config)
        await refuses(replace(config, nkey_seed_file=str(tmp_path / "other")), "Authorization Violation")
        await refuses(replace(config, nkey_seed_file=str(tmp_path / "missing")), "No such file")
        (tmp_path / "torn").write_bytes(bytes(ours.seed)[:-9])
        await refuses(replace(config, nkey_seed_file=str(tmp_path / "torn")), "(?i)seed")
    finally:
        server.stop()


def token(signer: nkeys.KeyPair, subject: str, name: str, nats: dict[str, Any]) -> str:
    """A JWT as NATS wants it (version 2, ed25519-nkey)."""

    def packed(part: bytes) -> str:
        return base64.urlsafe_b64encode(part).rstrip(b"=").decode()

    claims: dict[str, Any] = {"iat": int(time.time()), "iss": public(signer), "name": name, "sub": subject}
    claims["nats"] = {**nats, "version": 2}
    digest = hashlib.sha512(json.dumps(claims).encode()).digest()[:32]
    claims["jti"] = base64.b32encode(digest).rstrip(b"=").decode()
    signed = packed(b'{"typ":"JWT","alg":"ed25519-nkey"}') + "." + packed(json.dumps(claims).encode())
    return f"{signed}.{packed(signer.sign(signed.encode()))}"


async def test_a_credentials_file(tmp_path: Path) -> None:
    """Operator, account and user, as `nsc` would make them."""
    operator, account = key(nkeys.PREFIX_BYTE_OPERATOR), key(nkeys.PREFIX_BYTE_ACCOUNT)
    system, stranger = key(nkeys.PREFIX_BYTE_ACCOUNT), key(nkeys.PREFIX_BYTE_ACCOUNT)
    none = {"subs": -1, "data": -1, "payload": -1}
    limits_of_all = {**none, "imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": -1}
    limits = {**limits_of_all, "mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    account_jwt = token(operator, public(account), "A", {"type": "account", "limits": limits})
    operator_jwt = token(operator, public(operator), "O", {"type": "operator"})
    system_jwt = token(operator, public(system), "SYS", {"type": "account", "limits": limits_of_all})
    preload = f"resolver_preload: {{ {public(account)}: {account_jwt}, {public(system)}: {system_jwt} }}"
    for name, signer in (("ours", account), ("other", stranger)):
        user = key(nkeys.PREFIX_BYTE_USER)
        user_jwt = token(signer, public(user), "u", {"type": "user", **none})
        (tmp_path / name).write_text(
            f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{bytes(user.seed).decode()}\n------END USER NKEY SEED------\n"
        )
    operators = f"operator: {operator_jwt}\nsystem_account: {public(system)}\nresolver: MEMORY\n{preload}"
    server = EmbeddedServer.start(tmp_path / "nats", extra_config=operators)
    try:
        config = BusConfig(url=server.url, credentials_file=str(tmp_path / "ours"))
        await takes(config)
        await refuses(replace(config, credentials_file=str(tmp_path / "other")), "Authorization Violation")
        await refuses(replace(config, credentials_file=str(tmp_path / "missing")), "No such file")
    finally:
        server.stop()


# --- TLS ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ca`, `server` and `client` signed by it, and `other`, an authority that signed neither; each .pem and
    .key.
    """
    place = tmp_path_factory.mktemp("tls")
    for authority in ("ca", "other"):
        make_authority(place / f"{authority}.key", place / f"{authority}.pem")
    for name in ("server", "client"):
        files = (place / f"{name}.key", place / f"{name}.pem")
        make_certificate(name, *files, authority_key=place / "ca.key", authority=place / "ca.pem")
    return place


def tls_server(directory: Path, certificates: Path, more: str = "") -> EmbeddedServer:
    files = f'cert_file: "{certificates / "server.pem"}", key_file: "{certificates / "server.key"}"'
    return EmbeddedServer.start(directory / "nats", extra_config=f"tls {{ {files}{more} }}")


async def test_tls_by_an_authority_of_our_own(tmp_path: Path, certificates: Path) -> None:
    server = tls_server(tmp_path, certificates)
    try:
        config = BusConfig(url=server.url, tls_ca_file=str(certificates / "ca.pem"))
        await takes(config)
        await takes(replace(config, url=server.url.replace("nats://", "tls://")))
        await refuses(
            replace(config, tls_ca_file=str(certificates / "other.pem")), "certificate verify failed"
        )
        await refuses(replace(config, tls_ca_file=""), "certificate verify failed")
        await refuses(
            replace(config, tls_ca_file=str(tmp_path / "missing")), f"TLS.*{tmp_path}/missing.*No such file"
        )
    finally:
        server.stop()


async def test_a_certificate_of_the_client(tmp_path: Path, certificates: Path) -> None:
    server = tls_server(tmp_path, certificates, f', ca_file: "{certificates / "ca.pem"}", verify: true')
    try:
        with_none = BusConfig(url=server.url, tls_ca_file=str(certificates / "ca.pem"))
        ours = replace(
            with_none,
            tls_cert_file=str(certificates / "client.pem"),
            tls_key_file=str(certificates / "client.key"),
        )
        await takes(ours)
        await refuses_in_the_end(with_none, "(?i)certificate required|closed|EOF|reset|pipe")
        strange = replace(
            ours, tls_cert_file=str(certificates / "other.pem"), tls_key_file=str(certificates / "other.key")
        )
        await refuses_in_the_end(strange, "(?i)unknown ca|bad certificate|closed|EOF|reset|pipe")
        await refuses(
            replace(ours, tls_key_file=str(certificates / "server.key")), "TLS certificate .*client.pem"
        )
    finally:
        server.stop()
