"""The commands on a whole cluster: `events save`, live and stopped, and `replay`. No text, no token in the
file.
"""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from halfmoon.schemas.keys import pack_tokens
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.cluster.harness import Cluster, running
from tests.cluster.prompts import MODEL, prompt

SECRET = "Tell nobody that the treasure lies under the third oak."


def halfmoon(cluster: Cluster, *words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "halfmoon.cli.main", *words],
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


async def test_a_cluster_is_saved_and_replayed_and_its_file_holds_no_text(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    sizes = ("--prefill", "1", "--decode", "1", "--conductors", "2")
    flags = ("--engine", "null", *sizes)
    sent = [(f"{SECRET} Number {number}.", prompt(300 + number)) for number in range(20)]
    with running(tmp_path_factory.mktemp("saved"), *flags) as cluster:
        status, _, err = halfmoon(cluster, "policy", "set", "digest_events=100", "--nats", cluster.nats)
        assert (status, err) == (0, "")
        nc = await cluster.connect()
        answers = []
        for text, tokens in sent:
            answers += await asyncio.gather(
                cluster.generate(nc, prompt=text, max_tokens=40),
                cluster.generate(nc, prompt=tokens, max_tokens=5),
            )
        await nc.close()
        file = tmp_path / "live.jsonl.zst"
        status, out, err = halfmoon(cluster, "events", "save", str(file), "--nats", cluster.nats, "--json")
        assert (status, err) == (0, "")
        saved = json.loads(out)
        assert saved["decisions"] >= 4 * len(sent)
        running_too = halfmoon(
            cluster, "events", "save", str(tmp_path / "x"), "--store", str(cluster.directory)
        )
        assert running_too == (
            1,
            "",
            f"halfmoon: {cluster.directory}: its cluster runs; reach it with --nats\n",
        )

    after = tmp_path / "stopped.jsonl.zst"
    status, out, err = halfmoon(cluster, "events", "save", str(after), "--store", str(cluster.directory))
    assert (status, err) == (0, "")
    assert out.startswith(f"{after}: ")
    for path in (file, after):
        status, out, err = halfmoon(cluster, "replay", str(path), "--json")
        assert (status, err) == (0, "")
        verdict = json.loads(out)
        assert verdict["identical"]
        assert verdict["first_divergence"] is None
        assert verdict["decisions"] >= saved["decisions"]
        assert verdict["states"] >= 2, "each of two conductors said its state"
        assert verdict["states_differ"] == []
        assert verdict["events"] >= saved["events"]
    status, out, _ = halfmoon(cluster, "replay", str(file))
    assert status == 0
    assert out.startswith(f"{saved['events']:,} events, {saved['decisions']:,} decisions, identical; ")
    assert " state digests found again (" in out
    status, out, _ = halfmoon(cluster, "events", "show", str(file))
    assert out.count("RequestArrived ") == 2 * len(sent)

    tokenizer = Tokenizer.load(MODEL)
    secrets = [SECRET[5:20], "treasure"]
    for ids in [tokenizer.encode(SECRET), sent[0][1], *(answer["token_ids"] for answer in answers)]:
        secrets += [json.dumps(ids[2:6]), json.dumps(ids[2:6]).replace(" ", "")[1:-1]]
        secrets += [base64.b64encode(pack_tokens(ids[3:9]))[:-4].decode()]
    secrets += [answer["text"] for answer in answers if len(answer["text"]) > 4]
    for path in (file, after):
        raw = path.read_bytes()
        plain = zstandard.ZstdDecompressor().stream_reader(raw).read()
        assert plain.count(b'"RequestArrived"') == 2 * len(sent)
        for secret in secrets:
            assert secret.encode() not in raw
            assert secret.encode() not in plain, secret
        assert b"PrefillResult" not in plain
