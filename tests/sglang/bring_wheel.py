"""Has pip bring SGLang's wheel, without what it needs, once, and prints where it lies: in the cache folder."""

from __future__ import annotations

import subprocess
import sys

from halfmoon.workers.model.loading.cache_files import cache_folder

RELEASE = "0.5.23"

if __name__ == "__main__":
    place = cache_folder("sglang")
    place.mkdir(parents=True, exist_ok=True)
    found = sorted(place.glob(f"sglang-{RELEASE}-*.whl"))
    if not found:
        words = [
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            str(place),
            f"sglang=={RELEASE}",
        ]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True, stdout=sys.stderr)
        found = sorted(place.glob(f"sglang-{RELEASE}-*.whl"))
    print(found[0])
