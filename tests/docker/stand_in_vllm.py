#!/opt/halfmoon/bin/python
"""`vllm serve` in a container, as far as docker/compose.vllm.yaml asks for it: the tests' engine that computes nothing.

It takes the words that the compose file has for vLLM, and no others. It is mounted as `/opt/halfmoon/bin/vllm`, and a
checkout's `tests` at `/checkout/tests`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

sys.path.insert(0, "/checkout")

from tests.adapters.fake_engine import Engine, options


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--block-size", required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--max-num-batched-tokens", type=int, required=True)
    parser.add_argument("--kv-events-config", type=json.loads, required=True)
    args = parser.parse_args()
    # The engine's own ports of events are those behind its port.
    wanted = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{args.port + 1}",
        "replay_endpoint": f"tcp://*:{args.port + 2}",
    }
    if args.kv_events_config != wanted:
        sys.exit(f"--kv-events-config: {args.kv_events_config}, not {wanted}")
    words = [f"{args.port}", "--host", args.host, "--block-tokens", args.block_size]
    asyncio.run(Engine(options().parse_args(words)).run())


if __name__ == "__main__":
    main()
