"""The NATS API with nothing but nats-py: python examples/nats_request.py "Once upon a time"
[nats://127.0.0.1:4222]
"""

import asyncio
import json
import sys

import nats


async def main(prompt: str, url: str = "nats://127.0.0.1:4222") -> None:
    nc = await nats.connect(url)
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
