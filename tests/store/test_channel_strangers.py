"""The port of channels and who comes to it: other users, strangers without the secret, and listeners in between."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from channel_harness import NAMES, QUERY, accepted, addresses, fresh, hello, in_thread, memory, options

from halfmoon.store.channels import kinds
from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import HEADER_BYTES, MessageHeader, Op, pack_into
from halfmoon.store.channels.hello import HELLO_BYTES_MAX
from halfmoon.store.channels.listener import ChannelListener
from halfmoon.store.channels.opening import connect
from halfmoon.store.channels.options import ChannelOptions, channel_secret
from halfmoon.store.errors import ChannelError, ChannelLost, ChannelRefused
from halfmoon.store.transports.tcp import admission
from tests.eventually import BOUND_S, eventually_here

BETWEEN_HOSTS = ["tls", "tcp"]
NOBODY = 65534


def until(true: Callable[[], bool]) -> None:
    eventually_here(true, "what the test waits for", every_s=0.01)


def raw_address(address: str) -> tuple[int, str | tuple[str, int]]:
    if address.startswith("unix:"):
        return socket.AF_UNIX, "\0" + address.partition("/")[2]
    host, _, port = address.partition("://")[2].rpartition(":")
    return socket.AF_INET, (host, int(port))


def stranger(address: str) -> socket.socket:
    family, at = raw_address(address)
    connection = socket.socket(family)
    connection.connect(at)
    connection.settimeout(BOUND_S)
    return connection


@pytest.mark.parametrize("kind", BETWEEN_HOSTS)
def test_who_does_not_know_the_secret_opens_no_channel_and_passes_for_no_peer(kind: str) -> None:
    for theirs, mine in (("other", None), (None, "other")):
        with ChannelListener(hello("attention-0"), options(kind, **secret(theirs))) as listener:
            with pytest.raises((ChannelRefused, ChannelLost), match=r"secret|gave the channel up|TLS|closed"):
                connect(
                    addresses(listener, kind),
                    hello("decode-0"),
                    options(kind, **secret(mine)),
                    peer="attention-0",
                )
            until(lambda listener=listener: bool(listener.counters))
            assert sum(listener.counters.values()) == 1
            assert listener.accept() is None


def secret(name: str | None) -> dict[str, str]:
    return {"secret": channel_secret(name)} if name else {}


@pytest.mark.pure
def test_the_channels_secret_does_not_tell_the_clusters() -> None:
    assert "cluster" not in channel_secret("cluster")
    assert channel_secret("cluster") == channel_secret("cluster") != channel_secret("clusteR")
    with pytest.raises(ValueError, match="secret: must not be empty"):
        ChannelOptions(secret="")
    assert "hush" not in repr(ChannelOptions(secret="hush"))


@contextlib.contextmanager
def another_user(work: Callable[[], bytes]) -> Iterator[Callable[[], bytes]]:
    """`work` in a process of another user, which ends with the context; what it returned."""
    here, there = socket.socketpair()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            here.close()
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            there.sendall(work())
            there.recv(1)
        os._exit(0)
    there.close()
    here.settimeout(BOUND_S)
    yield lambda: here.recv(100)
    here.close()
    os.waitpid(child, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user too")
def test_another_user_of_the_host_gets_no_channel() -> None:
    with ChannelListener(hello("attention-0"), options("unix")) as listener:
        address = addresses(listener, "unix")[0]
        with another_user(lambda: b"heard " + stranger(address).recv(1)) as answer:
            assert answer() == b"heard "
        until(lambda: bool(listener.counters))
        assert dict(listener.counters) == {"refused_user": 1}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user too")
def test_a_name_that_another_user_took_is_not_believed() -> None:
    name = f"halfmoon-test-{os.getpid()}"
    server = socket.socket(socket.AF_UNIX)

    def squat() -> bytes:
        server.bind(f"\0{name}")
        server.listen()
        return b"there"

    with another_user(squat) as answer:
        assert answer() == b"there"
        address = f"unix:{kinds._network_id()}/{name}"
        with pytest.raises(ChannelRefused, match=f"user: {NOBODY} at the other end"):
            connect([address], hello("decode-0"), options("unix"), peer="attention-0")
    server.close()


@pytest.mark.pure
def test_an_address_of_another_host_is_no_way_over_a_local_socket() -> None:
    with pytest.raises(ChannelRefused, match="encryption: 'auto' here, and a is reached at unix:0123/x"):
        connect(["unix:0123/x"], hello("decode-0"), options("unix"), peer="a")


def test_encryption_is_the_default_between_hosts_and_plain_only_where_both_were_told_so() -> None:
    offered = {}
    for encryption in ("auto", "always", "never"):
        settings = ChannelOptions(secret="s", encryption=encryption)
        with ChannelListener(hello("attention-0"), settings) as listener:
            offered[encryption] = [address.partition(":")[0] for address in listener.addresses]
    assert offered == {"auto": ["unix", "tls"], "always": ["unix", "tls"], "never": ["unix", "tcp"]}
    for encryption, address in (("auto", "tcp://h:1"), ("always", "tcp://h:1"), ("never", "tls://h:1")):
        with pytest.raises(
            ChannelRefused, match=f"encryption: '{encryption}' here, and a is reached at {address}"
        ):
            connect([address], hello("d"), ChannelOptions(secret="s", encryption=encryption), peer="a")


@contextlib.contextmanager
def between(address: str, change: Callable[[bytes, int], bytes]) -> Iterator[tuple[str, bytearray]]:
    """Someone on the way, who sees all and may change what the caller says; his address, and all that he saw."""
    family, at = raw_address(address)
    seen, pairs = bytearray(), []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pump(source: socket.socket, target: socket.socket, forth: bool) -> None:
            with contextlib.suppress(OSError):
                while content := source.recv(65536):
                    seen.extend(content)
                    target.sendall(change(content, len(seen)) if forth else content)
            for end in (source, target):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

        def serve() -> None:
            with contextlib.suppress(OSError):
                caller = server.accept()[0]
                behind = socket.socket(family)
                behind.connect(at)
                pairs.extend([caller, behind])
                back = in_thread(lambda: pump(behind, caller, False))
                pump(caller, behind, True)
                back()

        serving = in_thread(serve)
        yield f"{address.partition(':')[0]}://127.0.0.1:{server.getsockname()[1]}", seen
        for end in pairs:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        serving()
        for end in pairs:
            end.close()


def test_nobody_on_the_way_between_hosts_reads_a_query() -> None:
    marks = {"tls": False, "tcp": True}
    for kind, readable in marks.items():
        with (
            ChannelListener(hello("attention-0"), options(kind)) as listener,
            between(addresses(listener, kind)[0], lambda content, _: content) as (address, seen),
            connect([address], hello("decode-0"), options(kind), peer="attention-0") as one,
            accepted(listener) as two,
        ):
            one.send(QUERY, memoryview(b"a prompt's query" * 10))
            assert two.receive(fresh).payload_bytes == 160
            assert (b"a prompt's query" in seen) is readable
            assert (b"decode-0" in seen) is readable


@pytest.mark.parametrize("kind", BETWEEN_HOSTS)
def test_nobody_on_the_way_changes_or_repeats_a_header(kind: str) -> None:
    def flipped(content: bytes) -> bytes:
        return content[:10] + bytes([content[10] ^ 1]) + content[11:]

    for change in (flipped, lambda content: content * 2):
        changing: list[Callable[[bytes], bytes]] = []
        with (
            ChannelListener(hello("attention-0"), options(kind)) as listener,
            between(
                addresses(listener, kind)[0],
                lambda content, _, changing=changing: changing[0](content) if changing else content,
            ) as (address, _),
            connect([address], hello("decode-0"), options(kind), peer="attention-0") as one,
            accepted(listener) as two,
        ):
            one.send(QUERY)
            assert two.receive(fresh).op is Op.QUERY
            changing.append(change)
            one.send(QUERY)
            with pytest.raises(ChannelLost):
                receive_two(two)


def receive_two(channel: WorkerChannel) -> None:
    for _ in range(2):
        channel.receive(fresh)


@pytest.mark.parametrize("kind", NAMES)
def test_any_number_of_silent_strangers_holds_few_connections_and_keeps_no_peer_out(kind: str) -> None:
    most, settings = admission.STRANGERS_PER_ADDRESS_MAX, options(kind)
    with ChannelListener(hello("attention-0"), settings) as listener:
        address = addresses(listener, kind)[0]
        gc.collect()  # files that an earlier test has left to it would be gone some time later
        threads, files = threading.active_count(), open_files()
        strangers = [stranger(address) for _ in range(200)]
        try:
            until(lambda: sum(listener.counters.values()) >= 200 - most)
            until(lambda: threading.active_count() - threads <= most)
            until(lambda: open_files() - files - 200 <= 2 * most)
            with (
                connect([address], hello("decode-0"), settings, peer="attention-0") as one,
                accepted(listener) as two,
            ):
                one.send(QUERY, memory(10))
                assert two.receive(fresh).payload_bytes == 10
        finally:
            for one_more in strangers:
                one_more.close()
        until(lambda: threading.active_count() <= threads)
        until(lambda: open_files() <= files)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("kind", NAMES)
def test_a_stranger_that_sends_a_byte_now_and_then_is_gone_when_its_time_is_over(kind: str) -> None:
    with ChannelListener(hello("attention-0"), options(kind, timeout_s=0.5)) as listener:
        with stranger(addresses(listener, kind)[0]) as one:
            send_slowly(one, BEGUN[kind])
        until(lambda: sum(listener.counters.values()) == 1)


def hello_header() -> bytes:
    raw = bytearray(HEADER_BYTES)
    pack_into(memoryview(raw), MessageHeader(Op.HELLO), HELLO_BYTES_MAX, 1, 0)
    return bytes(raw)


#: How a first message begins that is whole after more bytes than `send_slowly` sends: a handshake's record, a proof of
#: two frames, and a hello. It sends 600 at the most.
BEGUN = {"tls": b"\x16\x03\x01\x40\x00", "tcp": struct.pack("<III", 2, 0, 1000), "unix": hello_header()}


def send_slowly(stranger: socket.socket, first: bytes) -> None:
    """Until the other end is gone."""
    stranger.sendall(first)

    def gone() -> bool:
        try:
            stranger.sendall(b"\0")
        except (BrokenPipeError, ConnectionResetError):
            return True
        return False

    eventually_here(gone, "the connection ends", every_s=0.2)


@pytest.mark.parametrize("kind", NAMES)
def test_rubbish_before_the_hello_is_counted_and_nothing_more(kind: str) -> None:
    rubbish = [b"GET / HTTP/1.1\r\n\r\n" * 20, b"\0" * 100_000, b"\xff" * 64, bytes(range(256)) * 4]
    with ChannelListener(hello("attention-0"), options(kind)) as listener:
        for content in rubbish:
            with stranger(addresses(listener, kind)[0]) as one, contextlib.suppress(OSError):
                one.sendall(content)
                one.shutdown(socket.SHUT_WR)
                while one.recv(4096):
                    pass
        until(lambda: sum(listener.counters.values()) == len(rubbish))
        assert listener.accept() is None


def test_channels_that_nobody_accepts_are_bounded_and_end_with_the_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("halfmoon.store.channels.listener.WAITING_MAX", 3)
    settings = options("unix")
    with ChannelListener(hello("attention-0"), settings) as listener:
        ends = [
            connect(listener.addresses, hello(f"decode-{i}"), settings, peer="attention-0") for i in range(4)
        ]
    for one in ends:
        with pytest.raises(ChannelLost, match="closed"):
            one.receive(fresh)
        one.close()


def test_a_port_that_is_taken_is_said_so_and_nothing_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        files = open_files()
        with pytest.raises(ChannelError, match=f"cannot listen on 127.0.0.1:{port}"):
            ChannelListener(hello("attention-0"), options("tls", port=port))
        until(lambda: open_files() <= files)
    for port in (-1, 65536):
        with pytest.raises(ValueError, match=f"port: {port} is not in 0..65535"):
            options("tls", port=port)


@pytest.mark.pure
@pytest.mark.parametrize("address", ["99999", "", "-1", "x"])
@pytest.mark.parametrize("kind", BETWEEN_HOSTS)
def test_an_address_that_is_none_is_a_lost_channel(kind: str, address: str) -> None:
    with pytest.raises(ChannelLost, match="attention-0: "):
        connect(
            [f"{kind}://127.0.0.1:{address}"],
            hello("decode-0"),
            options(kind),
            peer="attention-0",
        )
