"""`halfmoon adapt` says which option is wrong, before it joins anything."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from halfmoon.cli.main import main
from halfmoon.workers.adapters import probe
from tests.adapters.harness import PROGRAMS, FakeEngine, fake_engines
from tests.ports import HeldPorts


def refusal(capsys: pytest.CaptureFixture[str], *words: str, kind: str = "vllm") -> str:
    with pytest.raises(SystemExit) as ended:
        main(["adapt", kind, "--id", f"{kind}-0", "--dtype", "float32", *words])
    assert ended.value.code == os.EX_CONFIG
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("halfmoon: ")
    return said.removeprefix("halfmoon: ")


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with fake_engines(1) as (one,):
        yield one


@pytest.mark.pure
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--url", "ftp://x"), "--url: 'ftp://x' is no URL like http://127.0.0.1:8000"),
        (("--url", "http://x", "--engine", "null"), "--engine null: an adapted engine computes"),
        (("--url", "http://x", "--engine-batch-max", "-1"), "--engine-batch-max -1: at least 0"),
        (("--url", "http://x", "--engine-token-budget", "-1"), "--engine-token-budget -1: at least 0"),
        (
            ("--url", "http://x", "--engine-key-file", "/nowhere"),
            "--engine-key-file '/nowhere': No such file",
        ),
    ],
)
def test_what_is_wrong_without_an_engine(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], text: str
) -> None:
    assert refusal(capsys, *words).startswith(text)


def test_an_engine_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with HeldPorts() as port:
        url = f"http://127.0.0.1:{port}"
        said = refusal(capsys, "--url", url, "--engine-wait-s", "0.1")
    assert said.startswith(f"--url {url}: ")
    assert said.endswith("no answer in 0 s (--engine-wait-s)")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--engine-model", "other"), "--engine-model other: URL serves fake"),
        (("--block-tokens", "24"), "--block-tokens 24: no multiple of the engine's blocks of 16 tokens"),
    ],
)
def test_what_does_not_fit_the_engine(
    capsys: pytest.CaptureFixture[str], engine: FakeEngine, words: tuple[str, ...], text: str
) -> None:
    assert refusal(capsys, "--url", engine.url, *words) == text.replace("URL", engine.url)


@pytest.mark.slow
def test_events_that_are_another_engines(
    capsys: pytest.CaptureFixture[str], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "EVENTS_S", 3.0)
    with fake_engines(1) as (other,):
        other.fault("events", events=[{"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}])
        at = [f"tcp://127.0.0.1:{other.port + 1}", f"tcp://127.0.0.1:{other.port + 2}"]
        said = refusal(capsys, "--url", engine.url, "--events", at[0], "--events-replay", at[1])
    assert said.startswith("--events: the events that came do not tell of the prompt's blocks")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ("--no-events",),
            "--events: no KV event came within 3 s of a prompt; start the engine with --kv-events-conf",
        ),
        pytest.param(
            ("--no-prefix-caching",),
            "--url URL: the engine runs with --no-enable-prefix-caching",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--tokenizer", ""),
            "--model smollm2-135m-instruct: URL serves a model with other tokens (fake)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--context", "200"),
            "--block-tokens 256: the engine takes 200 tokens at most",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--blocks", "8"),
            "--url URL: its cache of 128 tokens holds no block of 256",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--no-salts",),
            "--events: the engine's events do not tell the cache salt",
            marks=pytest.mark.slow,
        ),
        pytest.param(("--no-token-ids",), "--url URL: it answers without token_ids", marks=pytest.mark.slow),
        (
            ("sglang", "--no-events"),
            "--events: no KV event came within 3 s of a prompt; start the engine with --kv-events-config "
            """'{"publisher": "zmq", "endpoint": "tcp://*:5557"}' --page-size 64""",
        ),
        (
            ("sglang", "--ranks", "2"),
            "--url URL: the engine runs with --dp-size; each rank needs a server of its own",
        ),
        (("sglang", "--mode", "prefill"), "--role mixed: URL was started for the role prefill"),
        pytest.param(
            ("sglang", "--no-prefix-caching"),
            "--url URL: the engine runs with --disable-radix-cache",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("sglang", "--no-salts"),
            "--events: the engine's events do not tell the cache salt",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_an_engine_lacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], text: str
) -> None:
    monkeypatch.setattr(probe, "EVENTS_S", 3.0)
    wire, flags = (flags[0], flags[1:]) if flags[0] in PROGRAMS else ("vllm", flags)
    with fake_engines(1, *flags, wires=(wire,)) as (engine,):
        assert refusal(capsys, "--url", engine.url, kind=wire).startswith(text.replace("URL", engine.url))
