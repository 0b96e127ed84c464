"""Packages that bring policies, as an installer leaves them in a folder."""

from __future__ import annotations

import contextlib
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from halfmoon.conductor import plugins
from halfmoon.conductor.core.placement.policies import POLICIES, installed
from halfmoon.conductor.plugins import GROUP

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "policy"
FEWEST_ORDERS = "halfmoon_fewest_orders"


def package(place: Path, name: str, source: str, points: dict[str, str]) -> None:
    """`points`: its entry points of the group, name to value."""
    (place / f"{name}.py").write_text(source)
    described = place / f"{name}-1.0.dist-info"
    described.mkdir(exist_ok=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "\n".join(f"{point} = {value}" for point, value in points.items())
    (described / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}\n")


def example_package(place: Path, *, version: str = "1") -> None:
    """The one of docs/examples/policy, in a version."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    source = (EXAMPLE / f"{FEWEST_ORDERS}.py").read_text()
    assert 'version="1"' in source
    # Of another length each: Python takes what it compiled in the same second for the file's own.
    changed = source.replace('version="1"', f'version="{version}"') + "#" * len(version) * int(version) + "\n"
    package(place, FEWEST_ORDERS, changed, project["entry-points"][GROUP])


def nothing_installed() -> None:
    """As in a new process: no policy of another package is known, and none of these modules is loaded."""
    for title in installed():
        del POLICIES[title]
    plugins._installed.clear()
    plugins.failures.clear()
    for name in [name for name in sys.modules if name.startswith("halfmoon_")]:
        del sys.modules[name]


@contextlib.contextmanager
def site_of(tmp_path: Path) -> Iterator[Path]:
    """A folder of packages with the example in it; nothing of it is installed in the core yet, nor is it afterwards."""
    place = tmp_path / "site"
    place.mkdir()
    example_package(place)
    nothing_installed()
    sys.path.insert(0, str(place))
    try:
        yield place
    finally:
        sys.path.remove(str(place))
        nothing_installed()
