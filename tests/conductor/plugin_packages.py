"""Packages that bring policies, as an installer leaves them in a folder."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from halfmoon.conductor import plugins
from halfmoon.conductor.core.placement.policies import POLICIES
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


def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: no policy of another package is known, and none of these modules is loaded."""
    monkeypatch.setattr(plugins, "_installed", {})
    monkeypatch.setattr(plugins, "failures", type(plugins.failures)())
    for name in [name for name in POLICIES if "@" in name]:
        monkeypatch.delitem(POLICIES, name)
    for name in [name for name in sys.modules if name.startswith("halfmoon_")]:
        monkeypatch.delitem(sys.modules, name)


def site_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages with the example in it; nothing of it is installed in the core yet."""
    nothing_installed(monkeypatch)
    place = tmp_path / "site"
    place.mkdir()
    example_package(place)
    monkeypatch.syspath_prepend(str(place))
    return place
