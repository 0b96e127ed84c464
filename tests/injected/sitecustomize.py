"""Python loads this file in every process whose PYTHONPATH has the folder: what a whole run of the tests has changed in
all processes, by the variables of the environment that ask for it.
"""

from __future__ import annotations

import os

if os.environ.get("HALFMOON_TEST_DELAYS"):
    import halfmoon_delays  # noqa: F401
if os.environ.get("HALFMOON_TEST_KERNEL"):
    import halfmoon_kernels  # noqa: F401
