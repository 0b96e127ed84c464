"""`python tests/planted_faults.py [NAME ...]`: plants faults in a copy of the tree, one at a time, and looks whether
the tests that are to find each are red. Prints a line for each; exit status 1 when one was not found.

`make planted-faults` runs all. tests/test_planted_faults.py looks that each fault still has its place in the code.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.tree_copies import copy_tree

#: Seconds until tests that hang are ended: a fault may be found by that.
HANGS_S = 900


class Fault(NamedTuple):
    """`old` stands once in `file`; with `new` in its place, one of `tests` (pytest's words) is red."""

    file: str
    old: str
    new: str
    tests: str


FAULTS = {
    "a decode worker takes the second best token": Fault(
        "workers/model/sampling.py",
        "largest = logits.argmax(dim=-1).tolist()",
        "largest = logits.topk(2, dim=-1).indices[:, -1].tolist()",
        "tests/workers/test_sampling.py tests/workers/test_against_transformers.py",
    ),
    "a draw depends on what was drawn before": Fault(
        "workers/model/sampling.py",
        "target = uniform(seed, index) * float(cumulative[-1])",
        "params.__dict__.setdefault('drawn', []).append(0)\n"
        "    target = uniform(seed, len(params.__dict__['drawn'])) * float(cumulative[-1])",
        "tests/workers/test_sampling.py",
    ),
    "a block of another tenant is given out": Fault(
        "store/pool/pool.py",
        'self.slots[slot].tenant not in ("", tenant)',
        'self.slots[slot].tenant not in ("", tenant, self.slots[slot].tenant)',
        "tests/store/test_client.py tests/store/test_pool.py",
    ),
    "the keys of blocks say nothing of the version of the weights": Fault(
        "workers/frontend/prompts.py",
        "weight_version=weight_version,",
        'weight_version="",',
        "tests/adapters/test_weights.py",
    ),
    "a lease is never given back": Fault(
        "store/pool/pool.py",
        "            self.slots[slot].holders -= 1\n            self._settle(slot)\n        for key",
        "            self._settle(slot)\n        for key",
        "tests/store/test_pool.py",
    ),
    "a reader is not told that its lease had ended": Fault(
        "store/client.py",
        "                    except LeaseLost as problem:\n                        found.problems[i] = problem",
        "                    except LeaseLost:\n                        pass",
        "tests/store/test_stopped_readers.py",
    ),
    "an agent leaves its segment behind": Fault(
        "store/pool/segment.py",
        "        with contextlib.suppress(FileNotFoundError):\n            os.unlink(SHM / self.view.name)",
        "",
        "tests/store/test_failures.py",
    ),
    "a layer is announced before its bytes are there": Fault(
        "store/agent/push.py",
        "            await self._target.transport.write(self._target.peer, items, call)\n",
        "            late = asyncio.create_task(self._target.transport.write(self._target.peer, items, call))\n"
        "            late.add_done_callback(lambda done: done.exception())\n",
        "tests/store/test_agent.py tests/store/test_failures.py",
    ),
    "an order is carried out twice": Fault(
        "bus/connection.py",
        "                if mark in seen or mark <= forgotten:\n                    continue\n",
        "",
        "tests/bus/test_bus.py",
    ),
    "an event in another's name is believed": Fault(
        "schemas/contract/authors.py",
        "    return not field or source_id == subjects.SUPERVISOR or getattr(event, field) == source_id",
        "    return True",
        "tests/bus/test_permissions.py tests/bus/test_bus.py",
    ),
    "a draw of the conductor is by chance": Fault(
        "conductor/core/placement/policies.py",
        'found[_drawn(state.policy.seed, f"{part}:{draw}", len(found))]',
        'found[_drawn(id(found), f"{part}:{draw}", len(found))]',
        "tests/conductor/test_policies.py",
    ),
    "two digests of equal states differ": Fault(
        "conductor/core/choice.py",
        "    failed = [any(one in costed.avoid for one in _workers(placement)) for placement in (pair, mixed)]",
        "    failed = [id(one) % 3 == 0 for one in (pair, mixed)]",
        "tests/conductor/test_mixed.py tests/chaos/test_mixed_chaos.py",
    ),
    "a worker takes more KV than it has": Fault(
        "conductor/core/placement/decode_candidates.py",
        "    return sequences < worker.batch_max and reserved_blocks + blocks <= worker.kv_blocks",
        "    return sequences < worker.batch_max",
        "tests/conductor/test_placement.py tests/conductor/test_admission.py",
    ),
    "a request whose worker died is never placed again": Fault(
        "conductor/core/choice.py",
        "    pair, mixed = place_again(costed), mixed_again(costed)\n",
        "    pair = mixed = None\n",
        "tests/conductor/test_losses.py tests/chaos/test_chaos.py",
    ),
    "a cancelled request is computed to its end": Fault(
        "conductor/core/orders.py",
        "        withdraw(state, state.orders[request.order_id], out, prefill_runs=True, decode_runs=True)\n"
        "    end(state, request)\n    state.counters.cancelled += 1",
        "        pass\n    state.counters.cancelled += 1",
        "tests/conductor/test_requests.py tests/chaos/test_chaos.py",
    ),
}


def planted(fault: Fault, root: Path) -> str:
    """The source with the fault in it. Raises LookupError where its place is not there, or not once."""
    source = (root / fault.file).read_text()
    if (times := source.count(fault.old)) != 1:
        raise LookupError(f"{fault.file} has the place of the fault {times} times: {fault.old!r}")
    return source.replace(fault.old, fault.new)


def found(fault: Fault, tree: Path) -> tuple[bool, str]:
    """Whether a test was red with the fault in `tree`, and pytest's closing line. The tree is as it was afterwards."""
    file = tree / fault.file
    sound = file.read_text()
    file.write_text(planted(fault, tree))
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider"]
    try:
        ran = subprocess.run(
            [*pytest, *fault.tests.split()],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree / ".links")},
            capture_output=True,
            text=True,
            timeout=HANGS_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True, f"hangs for {HANGS_S} s"
    finally:
        file.write_text(sound)
    (closing, *_) = re.findall(r"^.*\d+ (?:passed|failed|error).* in .*$", ran.stdout, re.MULTILINE)[-1:] or [
        (ran.stdout + ran.stderr)[-500:]
    ]
    # 1: a test failed. Whatever else says that the tests did not run.
    return ran.returncode == 1, closing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {'; '.join(FAULTS)}")
    names = parser.parse_args().names or list(FAULTS)
    missed = []
    with tempfile.TemporaryDirectory() as directory:
        tree = copy_tree(Path(directory))
        for name in names:
            was_found, closing = found(FAULTS[name], tree)
            print(f"{'found ' if was_found else 'MISSED'}  {name}: {closing}", flush=True)
            if not was_found:
                missed.append(name)
    print(f"{len(names) - len(missed)} of {len(names)} faults were found")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
