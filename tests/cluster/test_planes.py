"""KV never touches NATS, the log holds no prompt, and it tells the whole life of a request."""

from __future__ import annotations

import base64
import contextlib
from pathlib import Path
from typing import Any

import pytest

from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import StartDecode, StartPrefill
from halfmoon.schemas.events import (
    BlocksStored,
    DecodeStarted,
    PrefillFinished,
    RequestArrived,
    RequestFinished,
)
from halfmoon.schemas.keys import pack_tokens
from halfmoon.schemas.kv import KvReady, PrefillResult, TransferOpened
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.cluster.harness import running
from tests.cluster.prompts import MODEL, prompt
from tests.cluster.steering import prefill_of
from tests.eventually import eventually

LAYERS, BLOCK_TOKENS, KV_BYTES_A_TOKEN = 30, 256, 46_080
#: In messages that come however long a request takes: heartbeats, and what nats-server says of streams.
BY_THE_CLOCK = (b'Heartbeat"', b'"io.nats.jetstream.')


def files_with(directory: Path, needle: bytes) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and needle in path.read_bytes()]


@pytest.mark.slow
async def test_a_long_prompt_moves_its_kv_beside_nats(tmp_path_factory: pytest.TempPathFactory) -> None:
    prompt_tokens = 4_000
    text = Tokenizer.load(MODEL).decode(prompt(prompt_tokens))
    place = tmp_path_factory.mktemp("planes")
    with contextlib.ExitStack() as stack:
        # A server of the test's own: on that of `halfmoon up` nobody may hear everything.
        server = EmbeddedServer.start(place / "nats")
        stack.callback(server.stop)
        flags = ("--prefill", "1", "--decode", "1", "--dtype", "float32", "--nats", server.url)
        slow_machine = ("--ttft-slo-ms", "600000", "--tbt-slo-ms", "60000")
        cluster = stack.enter_context(running(place, *flags, *slow_machine))
        nc = await cluster.connect()
        on_nats = 0

        async def tap(message: Any) -> None:
            nonlocal on_nats
            if not any(word in message.data[:64] for word in BY_THE_CLOCK):
                on_nats += len(message.data)

        everything_sent = await nc.subscribe(">", cb=tap)

        async def counted() -> int:
            """Bytes of all that was sent before this."""
            await nc.flush()
            await eventually(lambda: not everything_sent.pending_msgs, "all of it is counted")
            return on_nats

        before = (await cluster.events())[-1].seq
        sent_before = await counted()
        answer = await cluster.generate(nc, prompt=text, max_tokens=4, temperature=0, ignore_eos=True)
        seen = await counted() - sent_before  # before the log is read, which goes over NATS too
        went = await prefill_of(cluster, answer["id"])
        tokens = answer["usage"]["prompt_tokens"]
        blocks = -(-tokens // BLOCK_TOKENS)
        assert went.pushed_bytes == tokens * KV_BYTES_A_TOKEN
        print(f"{tokens} tokens: {went.pushed_bytes} bytes of KV on the data plane, {seen} bytes on NATS")
        assert 0 < seen < went.pushed_bytes / 200

        events = [s.event for s in await cluster.events(before)]
        kinds = [type(e) for e in events if getattr(e, "request_id", "") == answer["id"]]
        assert sorted(kinds, key=lambda k: k.__name__) == [
            DecodeStarted,
            PrefillFinished,
            RequestArrived,
            RequestFinished,
        ]
        assert kinds[0] is RequestArrived
        stored = {e.node_id for e in events if isinstance(e, BlocksStored)}
        assert stored == {"prefill-0", "decode-0"}
        orders = [
            o.decision
            for o in await cluster.decisions()
            if isinstance(o.decision, StartPrefill | StartDecode)
        ]
        assert [type(o) for o in orders] == [StartPrefill, StartDecode]
        assert {o.order_id for o in orders} == {went.order_id}
        progress = [message for _, message in await cluster.kv()]
        ready = [m for m in progress if isinstance(m, KvReady)]
        covered = {
            (layer, block)
            for m in ready
            for layer in range(m.layer, m.layer + m.layers)
            for block in range(m.first_block, m.first_block + m.blocks)
        }
        assert covered == {(layer, block) for layer in range(LAYERS) for block in range(blocks)}
        assert [type(m) for m in progress if not isinstance(m, KvReady)] == [TransferOpened, PrefillResult]

        ids = Tokenizer.load(MODEL).encode(text)
        secrets = [
            text[40:90].encode(),
            base64.b64encode(pack_tokens(ids[30:60])),
            ", ".join(map(str, ids[30:40])).encode(),
            ",".join(map(str, ids[30:40])).encode(),
        ]
        for stream in (subjects.EVENTS_STREAM, subjects.DECISIONS_STREAM, subjects.KV_STREAM):
            everything = b"\n".join(payload for _, _, payload in await cluster.raw(stream))
            assert everything
            assert not [secret for secret in secrets if secret in everything]
        await nc.close()
        left = place / "nats"
    assert files_with(left, b"RequestArrived")
    assert not files_with(left, secrets[0])
