"""Keys stand for tenants: what a sender may name, whose KVCache it reaches, and whose requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import orjson
import pytest
from frontend_double import cluster

from halfmoon.bus.credentials import key_file as key_file_of
from halfmoon.bus.credentials import make_all
from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.bus.permissions import authorization, cluster_identities
from halfmoon.schemas import subjects
from halfmoon.schemas.events import RequestArrived
from halfmoon.workers.frontend.edges.nats_service import settled
from halfmoon.workers.frontend.tenants import read_keys
from tests.eventually import BOUND_S, SCENARIO_S, eventually

KEYS = {"key-of-a": "a", "key-of-b": "b", "key-of-none": "", "key-of-all": "*"}
PROMPT = list(range(100, 140))


@pytest.mark.pure
def test_no_key_reaches_a_tenant_that_is_not_its_own(run: Any) -> None:
    """Keys × tenants in the body × salts: refused by the field's name, or the blocks of exactly one tenant and salt."""

    async def scenario(cluster: Any) -> None:
        blocks: dict[tuple[str, str], set[bytes]] = {}
        served = 0
        for (key, own), named, salt in itertools.product(
            KEYS.items(), (None, "", "a", "b", "*", "A", "a "), ("", "s")
        ):
            body = {"prompt": PROMPT, "max_tokens": 1, "tenant": named, "cache_salt": salt}
            headers = {"authorization": f"Bearer {key}"}
            status, _, answer = await cluster.post("/v1/completions", body, headers=headers)
            if own != "*" and named not in (None, "", own):
                assert (status, answer["error"]["param"]) == (403, "tenant"), (key, named)
                assert answer["error"]["code"] == "not_your_tenant"
                continue
            assert status == 200, (key, named, answer)
            served += 1
            arrived = (await cluster.double.wait_for(RequestArrived, served))[-1]
            assert arrived.tenant == ((named or "") if own == "*" else own)
            blocks.setdefault((arrived.tenant, salt), set()).add(arrived.block_keys)
        assert all(len(keys) == 1 for keys in blocks.values()), "one tenant and salt, one chain"
        chains = [chain for keys in blocks.values() for chain in keys]
        assert len(set(chains)) == len(blocks) == 12
        assert len(chains[0]) == 2 * 16

    run(scenario, api_keys=KEYS)


@pytest.mark.pure
def test_without_a_key_nothing_is_looked_at(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        for headers in (
            {},
            {"authorization": "Basic key-of-a"},
            {"authorization": "Bearer"},
            {"authorization": "Bearer kEy-of-a"},
        ):
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                status, answer_headers, answer = await cluster.post(path, b"junk", headers=headers)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
                assert answer_headers["www-authenticate"] == "Bearer"
            assert (await cluster.http_get("/v1/models", headers=headers))[0] == 401
        assert (await cluster.http_get("/health"))[0] == 200
        lower = {"authorization": "bearer key-of-a"}
        assert (await cluster.post("/tokenize", {"prompt": "x"}, headers=lower))[0] == 200
        assert "key-of" not in repr(cluster.frontend.config)

    run(scenario, api_keys=KEYS)


def key_file(folder: Path, text: str, mode: int = 0o600) -> str:
    file = folder / "keys"
    file.write_text(text)
    file.chmod(mode)
    return str(file)


@pytest.mark.pure
def test_a_line_of_the_key_file_is_a_key_or_a_tenant_and_its_key(tmp_path: Path) -> None:
    text = "# clients\n\nplain-key-0123456789  # of nobody\n acme   acme-key-0123456789 \r\n* all-key-0123456789\n"
    assert read_keys(key_file(tmp_path, text)) == {
        "plain-key-0123456789": "",
        "acme-key-0123456789": "acme",
        "all-key-0123456789": "*",
    }


@pytest.mark.pure
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("secret-key-012345678\na b secret-key-0123456789\n", "line 2: KEY, or TENANT KEY"),
        ("a secret\n", "line 1: a key has at least 16 characters"),
        ("secret-key-schlüssel-0\n", "all of them ASCII"),
        ("a secret-key-0123456789\nb secret-key-0123456789\n", "line 2: this key stands there twice"),
        ("a* secret-key-0123456789\n", "line 1: KEY, or TENANT KEY"),
        ("# none\n", "there is no key in it"),
    ],
)  # fmt: skip
def test_a_wrong_key_file_is_refused_by_its_line_and_without_its_keys(
    tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as refused:
        read_keys(key_file(tmp_path, text))
    assert "secret-key" not in str(refused.value)


@pytest.mark.pure
@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o666])
def test_a_key_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ValueError, match=f"mode 0{mode:o}"):
        read_keys(key_file(tmp_path, "plain-key-0123456789\n", mode))
    for fine in (0o400, 0o600, 0o440, 0o640):
        read_keys(key_file(tmp_path, "plain-key-0123456789\n", fine))


@pytest.mark.pure
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a file away")
def test_a_key_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = key_file(tmp_path, "plain-key-0123456789\n")
    os.chown(file, 12345, -1)
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    with pytest.raises(ValueError, match="another user"):
        read_keys(file)


# --- over NATS ----------------------------------------------------------------------------------------------

#: A name's credentials, and what its inboxes begin with.
CLIENTS = {"client": "_INBOX", "tenant-acme": "_INBOX.acme", "tenant-globex": "_INBOX.globex"}


class NatsClient:
    """A plain client with its credentials; `refused` is what the server did not let it do."""

    def __init__(self, name: str, url: str, keys: Path) -> None:
        self.name, self._url, self._keys = name, url, keys
        self.refused: list[str] = []
        self.nc = nats.NATS()

    async def __aenter__(self) -> NatsClient:
        async def note(problem: Exception) -> None:
            self.refused.append(str(problem))

        seed = str(key_file_of(self._keys, self.name))
        await self.nc.connect(
            self._url, nkeys_seed=seed, inbox_prefix=CLIENTS[self.name], error_cb=note, allow_reconnect=False
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.nc.close()

    async def ask(self, subject: str, body: Any, timeout_s: float = BOUND_S) -> Any:
        """The answer's JSON; None when the server refused the request."""
        refused = len(self.refused)
        asking = asyncio.ensure_future(self.nc.request(subject, orjson.dumps(body), timeout=timeout_s))
        told = "it is answered or refused"
        await eventually(lambda: asking.done() or len(self.refused) > refused, told, every_s=0.005)
        if not asking.done():
            asking.cancel()
            return None
        return orjson.loads(asking.result().data)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    """A server that knows the clients of a cluster: its URL, the same for the cluster's processes, and the keys."""
    place = tmp_path_factory.mktemp("guarded")
    identities = cluster_identities(
        conductors=1, frontends=1, workers={"prefill": 1, "decode": 1}, tenants=("acme", "globex")
    )
    known = authorization(make_all(place / "keys", identities))
    known = known.replace("users: [", "users: [ { user: cluster, password: cluster }")
    server = EmbeddedServer.start(place / "nats", extra_config=known)
    yield server.url, server.url.replace("//", "//cluster:cluster@"), place / "keys"
    server.stop()


def over_nats(guarded: tuple[str, str, Path], tokenizer: Any, scenario: Any) -> None:
    async def main() -> None:
        url, inside, keys = guarded
        async with cluster(inside, tokenizer) as made, contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(NatsClient(name, url, keys)) for name in CLIENTS]
            await scenario(made, *clients)

    asyncio.run(asyncio.wait_for(main(), SCENARIO_S))


def test_no_credentials_reach_a_tenant_that_is_not_their_own(guarded: Any, tokenizer: Any) -> None:
    """Credentials × tenants' subjects × tenants in the body × salts."""

    async def scenario(made: Any, *clients: NatsClient) -> None:
        blocks: dict[tuple[str, str], set[bytes]] = {}
        served = 0
        for client, on, named, salt in itertools.product(
            clients, ("", "acme", "globex"), (None, "acme", "globex", "x"), ("", "s")
        ):
            own = client.name.partition("-")[2]
            body = {"prompt": PROMPT, "max_tokens": 1, "tenant": named, "cache_salt": salt}
            answer = await client.ask(subjects.api("generate", on), body)
            if on != own:
                assert answer is None, (client.name, on)
                continue
            if own and named not in (None, own):
                assert (answer["error"]["param"], answer["error"]["code"]) == ("tenant", "not_your_tenant")
                continue
            assert answer["done"], answer
            served += 1
            arrived = (await made.double.wait_for(RequestArrived, served))[-1]
            assert arrived.tenant == (own or named or "")
            blocks.setdefault((arrived.tenant, salt), set()).add(arrived.block_keys)
        chains = [chain for keys in blocks.values() for chain in keys]
        assert len(set(chains)) == len(chains) == len(blocks) == 8
        assert len(await made.double.wait_for(RequestArrived)) == served

    over_nats(guarded, tokenizer, scenario)


def test_a_tenant_does_not_see_or_end_anothers_requests(guarded: Any, tokenizer: Any) -> None:
    async def scenario(made: Any, client: NatsClient, acme: NatsClient, globex: NatsClient) -> None:
        async def never(*_: Any) -> None:
            await asyncio.Event().wait()

        made.double.script = never
        body = {"prompt": PROMPT, "request_id": "mine"}
        asked = [
            asyncio.ensure_future(
                each.nc.request(subjects.api("generate", tenant), orjson.dumps(body), timeout=BOUND_S)
            )
            for each, tenant in ((acme, "acme"), (globex, "globex"))
        ]
        first, second = await made.double.wait_for(RequestArrived, 2)
        of_acme = first if first.tenant == "acme" else second
        for name in (of_acme.request_id, "theirs"):
            answer = await globex.ask(subjects.api("cancel", "globex"), {"id": name})
            assert answer == {"id": name, "cancelled": False}
        answer = await globex.ask(subjects.api("cancel", "globex"), {"id": "mine"})
        assert answer["cancelled"], "its own of that name"
        assert orjson.loads((await asked[1]).data)["error"]["code"] == "cancelled"
        assert list(made.frontend.registry.requests) == [of_acme.request_id]
        answer = await client.ask(subjects.api("cancel"), {"id": "mine"})
        assert answer["cancelled"], "a client of all may end any"
        assert orjson.loads((await asked[0]).data)["error"]["code"] == "cancelled"
        for subject in ("_INBOX.>", "_INBOX.acme.>", "_INBOX.*.*", subjects.api("*", "*"), "$SRV.>"):
            await globex.nc.subscribe(subject)
        await settled(globex.nc)
        assert len(globex.refused) == 5
        await globex.nc.publish(subjects.api("generate", "globex"), orjson.dumps(body), reply="_INBOX.acme.x")
        await globex.nc.publish(subjects.api("generate", "globex"), orjson.dumps(body), reply="_INBOX.x")
        answer = await globex.ask(subjects.api("tokenize", "globex"), {"prompt": "x"})
        assert answer["count"] == 1
        assert len(await made.double.wait_for(RequestArrived)) == 2, "answers go to the tenant's own inboxes"

    over_nats(guarded, tokenizer, scenario)


@pytest.mark.pure
def test_what_is_no_tenants_name_is_refused(run: Any) -> None:
    """On a server that asks for no credentials."""

    async def scenario(cluster: Any) -> None:
        for tenant in ("a" * 65, "ä", "a$"):
            inbox = f"_INBOX.{tenant}.x"
            answers = await cluster.client.nc.subscribe(inbox)
            await cluster.client.nc.publish(f"halfmoon.v1.generate.{tenant}", b'{"prompt": "x"}', reply=inbox)
            answer = orjson.loads((await answers.next_msg(timeout=BOUND_S)).data)
            assert answer["error"]["code"] == "not_your_tenant"

    run(scenario)
