"""Reading traces: what is in them, and which line is wrong."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from halfmoon.conductor.simulation.trace import Arrival, TraceInvalid, copies, faster, read_trace, reuse

GOOD = b'{"timestamp": 5, "input_length": 1025, "output_length": 7, "hash_ids": [3, 4, 5]}\n'


def written(folder: Path, *lines: bytes, name: str = "t.jsonl") -> Path:
    path = folder / name
    path.write_bytes(b"".join(lines))
    return path


def test_the_conversation_trace_is_whole(conversation: list[Arrival]) -> None:
    assert len(conversation) == 12_031
    assert sum(arrival.prompt_tokens for arrival in conversation) == 144_793_823
    assert conversation[-1].at_ns == 3_536_999_000_000
    assert max(arrival.output_tokens for arrival in conversation) == 2_000


def test_reuse_of_the_conversation_trace_is_what_was_published(trace_file: Path) -> None:
    """Unbounded, 3 M tokens, and eight workers' 3,000 blocks in one pool."""
    assert round(reuse(trace_file), 3) == 0.374
    assert round(reuse(trace_file, 3_000_000), 3) == 0.139
    assert round(reuse(trace_file, 8 * 3_000 * 512), 4) == 0.3125


def test_only_whole_blocks_have_keys(tmp_path: Path) -> None:
    (arrival,) = read_trace(written(tmp_path, GOOD))
    assert arrival == Arrival(
        at_ns=5_000_000,
        prompt_tokens=1025,
        output_tokens=7,
        block_keys=(3).to_bytes(16, "big") + (4).to_bytes(16, "big"),
    )


def test_smaller_blocks_share_what_the_larger_ones_share(tmp_path: Path) -> None:
    other = b'{"timestamp": 6, "input_length": 700, "output_length": 1, "hash_ids": [3, 9]}\n'
    one, two = read_trace(written(tmp_path, GOOD, other), block_tokens=256)
    assert (len(one.block_keys), len(two.block_keys)) == (4 * 16, 2 * 16)
    assert one.block_keys[:32] == two.block_keys[:32]


def test_requests_of_lengths_only_share_nothing(tmp_path: Path) -> None:
    line = b'{"timestamp": 0, "input_length": 1024, "output_length": 1}\n'
    one, two = read_trace(written(tmp_path, line, line))
    assert len(one.block_keys) == len(two.block_keys) == 32
    assert {one.block_keys[:16], one.block_keys[16:]}.isdisjoint({two.block_keys[:16], two.block_keys[16:]})


def test_a_turn_of_a_session_begins_with_what_was_said(tmp_path: Path) -> None:
    turns = [
        b'{"timestamp": 0, "session_id": "a", "input_length": 1024, "output_length": 100}\n',
        b'{"timestamp": 1, "session_id": 2, "input_length": 2048, "output_length": 100}\n',
        b'{"timestamp": 2, "session_id": "a", "input_length": 2048, "output_length": 100}\n',
        b'{"timestamp": 3, "session_id": "a", "input_length": 600, "output_length": 100}\n',
    ]
    first, other, second, anew = read_trace(written(tmp_path, *turns))
    assert second.block_keys.startswith(first.block_keys)
    assert not other.block_keys.startswith(first.block_keys[:16])
    assert not anew.block_keys.startswith(first.block_keys[:16])


def test_compressed_traces_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD))
    assert read_trace(path) == read_trace(written(tmp_path, GOOD))
    path.write_bytes(gzip.compress(GOOD)[:-6])
    with pytest.raises(TraceInvalid, match="after line"):
        read_trace(path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, b"{\n"], r"t\.jsonl:2: "),
        ([GOOD, b"\n", b'{"timestamp": 6, "output_length": 1}\n'], r"t\.jsonl:3: .*input_length"),
        ([GOOD, GOOD.replace(b"5,", b"4,", 1)], r"t\.jsonl:2: timestamp 4 is before 5: not in order"),
        ([GOOD.replace(b"1025", b"0")], r"t\.jsonl:1: input_length 0 is not within"),
        ([GOOD.replace(b"7,", b"0,")], r"t\.jsonl:1: output_length 0"),
        ([GOOD.replace(b"1025", b'"x"')], r"t\.jsonl:1: .*input_length"),
        ([GOOD.replace(b"[3, 4, 5]", b"[3, 4]")], r"t\.jsonl:1: hash_ids names 2 blocks, 1025 tokens are 3"),
        ([GOOD.replace(b"[3, 4", b"[-3, 4")], r"t\.jsonl:1: hash_ids"),
        ([GOOD, GOOD.replace(b"[3, 4, 5]", b"[3, 5, 3]")], r"t\.jsonl:2: hash_ids names a block twice"),
        ([GOOD.replace(b'"timestamp": 5', b'"timestamp": -5')], r"t\.jsonl:1: timestamp -5"),
        ([b"\xff\xfe\n"], r"t\.jsonl:1: "),
        ([], r"holds no request"),
    ],
)
def test_a_malformed_or_unordered_trace_names_the_line(
    tmp_path: Path, lines: list[bytes], message: str
) -> None:
    with pytest.raises(TraceInvalid, match=message):
        read_trace(written(tmp_path, *lines))


def test_blocks_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceInvalid, match="cannot be cut into 100"):
        read_trace(written(tmp_path, GOOD), block_tokens=100)


def test_speed_divides_times(tmp_path: Path) -> None:
    assert [arrival.at_ns for arrival in faster(read_trace(written(tmp_path, GOOD)), 2.0)] == [2_500_000]


def test_copies_of_a_trace_share_nothing_with_each_other(tmp_path: Path) -> None:
    one, two, three = copies(read_trace(written(tmp_path, GOOD)), 3)
    assert (one.at_ns, two.at_ns, three.at_ns) == (5_000_000, 6_000_000, 7_000_000)
    keys = [arrival.block_keys[at : at + 16] for arrival in (one, two, three) for at in (0, 16)]
    assert len(set(keys)) == 6
