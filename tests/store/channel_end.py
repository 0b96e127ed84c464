"""An attention worker's end of a channel in a process of its own: `python channel_end.py KIND BEHAVIOUR`; prints its
addresses. `answer`: each message comes back as a state; `silent`: nothing is ever received.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[2]))

from channel_harness import accepted, addresses, hello, into, memory, options

from halfmoon.store.channels.header import Dtype, MessageHeader, Op
from halfmoon.store.channels.listener import ChannelListener
from halfmoon.store.errors import ChannelLost


def main(kind: str, behaviour: str) -> None:
    target = memory(8 << 20)
    with ChannelListener(hello("attention-0"), options(kind)) as listener:
        print(json.dumps(addresses(listener, kind)), flush=True)
        with accepted(listener) as channel:
            while behaviour == "silent":
                signal.pause()
            try:
                while True:
                    header = channel.receive(into(target))
                    answer = MessageHeader(Op.PARTIAL, Dtype.F32, layer=header.layer, rows=header.rows)
                    channel.send(answer, target[: header.payload_bytes])
            except ChannelLost:
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
