"""`python benchmarks/experiments.py [NAME ...]`: `halfmoon experiments`, with its options, and beside its tables
(`DIR/experiments/measured.json`) on what code each was made.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import orjson

from benchmarks.measured import beside, keep
from benchmarks.papers import command as experiments
from halfmoon.cli.main import main as halfmoon


def note(path: Path, names: set[str]) -> None:
    """Experiments that were made together have one record: `[{"names": [...], "beside": {...}}, ...]`."""
    earlier = orjson.loads(path.read_bytes()) if path.exists() else []
    now = beside()
    # The command line loads them, and no simulation comes to them.
    now["modules"] = {
        name: digest
        for name, digest in now["modules"].items()
        if not name.startswith(("bus", "cli", "store", "workers/"))
    }
    left = [{**record, "names": sorted({*record["names"]} - names)} for record in earlier]
    keep(path, [*(record for record in left if record["names"]), {"names": sorted(names), "beside": now}])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    experiments.add(parser)
    args = parser.parse_args()
    try:
        halfmoon(["experiments", *sys.argv[1:]])
    except SystemExit as ended:
        if ended.code:
            raise
    note(Path(args.out) / "experiments" / "measured.json", {*(args.names or experiments.NAMES)})


if __name__ == "__main__":
    main()
