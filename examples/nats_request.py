"""The NATS API with nothing but nats-py: python examples/nats_request.py "Once upon a time" [CLUSTER]

`halfmoon up` lets its user know where its server is, and with which key a client is let in.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import nats

STATE = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "halfmoon"


async def main(prompt: str, cluster: str = "local") -> None:
    running = json.loads((STATE / cluster / "cluster.json").read_text())
    nc = await nats.connect(running["nats"], nkeys_seed=f"{running['credentials']}/client.nk")
    replies = await nc.subscribe(inbox := nc.new_inbox())
    request = {"prompt": prompt, "max_tokens": 32, "stream": True}
    await nc.publish("halfmoon.v1.generate", json.dumps(request).encode(), reply=inbox)
    async for message in replies.messages:
        chunk = json.loads(message.data or b'{"error": {"message": "no frontend is running"}}')
        if "error" in chunk or chunk.get("done"):
            print("\n", chunk.get("usage") or chunk["error"]["message"])
            break
        print(chunk["text"], end="", flush=True)
    await nc.close()


asyncio.run(main(*sys.argv[1:]))
