"""Cost profiles for the clusters of tests: measured once for a checkout, then the same at each start.

`halfmoon up` keeps what its workers measured in the user's cache folder. A profile that a busy machine made doubtful is
measured again there, by each cluster. No test rests on times, so the clusters of tests have a cache folder of their
own: it begins as the user's, in it a profile counts as agreed, and one that a worker has thrown away is put back.
Weights, which are large, stay in the user's.
"""

from __future__ import annotations

import contextlib
import json
from functools import partial
from pathlib import Path

from halfmoon.workers.model.loading.cache_files import cache_folder, replace_file

#: pytest's own folder for what may be lost.
HOME = Path(__file__).parents[2] / ".pytest_cache" / "clusters"
SHARED = ("weights", "fingerprints")


class SteadyProfiles:
    """`home` is for XDG_CACHE_HOME of a cluster; `settle` is called before each start and each kill."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._folder = home / "halfmoon" / "profiles"
        self._known: dict[str, str] = {}

    def settle(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for part in SHARED:
            self._share(cache_folder(part))
        for folder in (cache_folder("profiles"), self._folder):  # what is newer in our own counts
            for file in folder.glob("*.json"):
                with contextlib.suppress(OSError, ValueError):  # a worker has just thrown it away
                    self._know(file)
        for name, text in self._known.items():
            replace_file(self._folder / name, partial(_write, text))

    def _know(self, file: Path) -> None:
        kept = json.loads(file.read_text())
        if "agreed" in kept:  # the other files of this folder say how exact numerics are
            kept["agreed"] = True
        self._known[file.name] = json.dumps(kept)

    def _share(self, users: Path) -> None:
        link = self.home / "halfmoon" / users.name
        users.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink() or link.readlink() != users:
            link.unlink(missing_ok=True)
            with contextlib.suppress(FileExistsError):  # another process of this checkout was faster
                link.symlink_to(users)


def _write(text: str, place: Path) -> None:
    place.write_text(text)


PROFILES = SteadyProfiles(HOME)
