"""Keys stand for tenants: what a sender may name, whose KVCache it reaches, and whose requests."""

from __future__ import annotations

import itertools
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from halfmoon.schemas.events import RequestArrived
from halfmoon.workers.frontend.tenants import read_keys

KEYS = {"key-of-a": "a", "key-of-b": "b", "key-of-none": "", "key-of-all": "*"}
PROMPT = list(range(100, 140))


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


def test_a_line_of_the_key_file_is_a_key_or_a_tenant_and_its_key(tmp_path: Path) -> None:
    text = "# clients\n\nplain-key-0123456789\n acme   acme-key-0123456789 \r\n* all-key-0123456789\n"
    assert read_keys(key_file(tmp_path, text)) == {
        "plain-key-0123456789": "",
        "acme-key-0123456789": "acme",
        "all-key-0123456789": "*",
    }


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


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o666])
def test_a_key_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ValueError, match=f"mode 0{mode:o}"):
        read_keys(key_file(tmp_path, "plain-key-0123456789\n", mode))
    for fine in (0o400, 0o600, 0o440, 0o640):
        read_keys(key_file(tmp_path, "plain-key-0123456789\n", fine))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a file away")
def test_a_key_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = key_file(tmp_path, "plain-key-0123456789\n")
    os.chown(file, 12345, -1)
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    with pytest.raises(ValueError, match="another user"):
        read_keys(file)
