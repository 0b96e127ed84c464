"""Mooncake's store as `transfer.py` measures it: one process holds the values, another gets them into its own
memory.

Run by the interpreter of an environment that has the wheel `mooncake-transfer-engine-non-cuda`, and by
nothing of ours: `mooncake_store.py serve|get MASTER`. One line in (`big`, `small`, `end`), one line of JSON
out.
"""

import ctypes
import json
import os
import resource
import sys
import time

from mooncake.store import MooncakeDistributedStore

MIB = 1024 * 1024
SIZES = {"big": 64 * MIB, "small": 4096}


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    role, master = sys.argv[1:]
    # The wheel writes to standard output; what we say must stay apart from it.
    say = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    store = MooncakeDistributedStore()
    segment = 256 * MIB if role == "serve" else 0
    if store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 128 * MIB, "tcp", "", master):
        raise SystemExit("setup failed")
    buffer = ctypes.create_string_buffer(SIZES["big"])
    address = ctypes.addressof(buffer)
    if role == "serve":
        value = os.urandom(MIB) * 64
        failed = [name for name, size in SIZES.items() if store.put(name, value[:size])]
    else:
        failed = ["buffer"] if store.register_buffer(address, SIZES["big"]) else []
    print(json.dumps(failed), file=say)
    for line in sys.stdin:
        if (name := line.strip()) == "end":
            break
        started = time.perf_counter()
        got = store.get_into(name, address, SIZES[name]) if name in SIZES else 0
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "cpu_s": cpu_s(), "bytes": got}), file=say)
    store.close()


if __name__ == "__main__":
    main()
