"""Whatever lies where an option names a file, the command ends with one line that names the option and the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from halfmoon.cli.main import main

GOLDEN = Path(__file__).parent / "replay" / "golden" / "smollm2.jsonl.zst"
NOWHERE = ["--nats", "nats://127.0.0.1:1"]
STORE = ["store", "--node", "a", "--engine", "null", *NOWHERE]
OPTIONS = {
    "--config": ["status"],
    "--nats-nkey-file": ["status", *NOWHERE],
    "--nats-credentials": ["status", *NOWHERE],
    "--nats-ca": ["status", *NOWHERE],
    "--what-if": ["replay", str(GOLDEN)],
    "--layout-file": STORE,
}
CONTENTS = {
    "binary": b"\xff\x00\x80" * 100,
    "deep": b"a = " + b"[" * 100_000,
    "digits": b"a = " + b"9" * 5000,
    "a list": b"[1, 2]",
}
NO_FILES = ["missing", "folder", "fifo", "loop", "sparse"]


def place(kind: str, folder: Path) -> Path:
    path = folder / "named"
    match kind:
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path)
        case "sparse":
            path.touch()
            os.truncate(path, 100 << 30)
        case "missing":
            pass
        case _:
            path.write_bytes(CONTENTS[kind])
    return path


@pytest.mark.parametrize("kind", [*NO_FILES, *CONTENTS])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_bad_file_is_one_line_of_an_option(
    option: str, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if kind in CONTENTS and option in ("--nats-credentials", "--nats-ca"):
        pytest.skip("its content is read when a connection is made")
    path = place(kind, tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([*OPTIONS[option], option, str(path)])
    assert ended.value.code == (os.EX_CONFIG if OPTIONS[option] == STORE else 1)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert option in lines[0]
    assert str(path) in lines[0]
