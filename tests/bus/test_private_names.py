"""Private names of libraries that are used here, each list whole: what a newer version takes away is named, and so is
what is used or shadowed from today on. Why they are needed: `bus/client.py`, `bus/edge/http_server.py`.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.metadata
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
NATS_FILES = ("bus/client.py", "bus/wire.py", "bus/connection.py", "workers/frontend/edges/nats_service.py")
#: Messages as they are parsed, in place of tasks and queues; what waits to be sent; errors that would end the client.
NATS_CLIENT = {
    "_attempt_reconnect",
    "_error_cb",
    "_flush_pending",
    "_max_payload",
    "_pending",
    "_pending_data_size",
    "_process_connect_init",
    "_process_err",
    "_process_info",
    "_process_msg",
    "_process_op_err",
    "_process_ping",
    "_process_pong",
    "_ps",
    "_remove_sub",
    "_send_unsubscribe",
    "_transport",
}
NATS_SUBSCRIPTION = {"_id"}
#: Of a connection over TLS, to end it without a farewell; and what its data is fed to.
NATS_TRANSPORT = {"_io_reader", "_io_writer"}
#: What came by way of the stream, and is not read yet. `_transport` is read of the client alone.
STREAM_READER = {"_buffer", "_transport"}
HTTP_FILES = ("bus/edge/http_server.py",)
#: The loop that a request is made with; the hook before the head of each answer.
HTTP_CONNECTION = {"_loop"}
HTTP_REQUEST = {"_prepare_hook"}


_STREAM = asyncio.StreamReader(loop=SimpleNamespace(get_debug=lambda: False))  # type: ignore[arg-type]


def private_names(files: tuple[str, ...]) -> set[str]:
    """Attributes that are read, written or defined there, of whatever object."""
    found = set()
    for file in files:
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            match node:
                case ast.Attribute(attr=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                    found.add(name)
    return {name for name in found if re.match(r"_[^_]", name)}


@pytest.mark.parametrize(
    ("files", "library", "used"),
    [
        pytest.param(NATS_FILES, Client(), NATS_CLIENT, id="nats-client"),
        pytest.param(NATS_FILES, Subscription(Client(), 1), NATS_SUBSCRIPTION, id="nats-subscription"),
        pytest.param(NATS_FILES, TcpTransport(), NATS_TRANSPORT, id="nats-transport"),
        pytest.param(("bus/client.py",), _STREAM, STREAM_READER, id="stream"),
        pytest.param(HTTP_FILES, web.RequestHandler, HTTP_CONNECTION, id="http-connection"),
        pytest.param(HTTP_FILES, web.BaseRequest, HTTP_REQUEST, id="http-request"),
    ],
)
def test_the_private_names_of_a_library_that_are_used_are_these(
    files: tuple[str, ...], library: object, used: set[str]
) -> None:
    assert private_names(files) & set(dir(library)) == used


@pytest.mark.parametrize("name", ["aiohttp", "nats-py"])
def test_a_version_that_these_names_were_not_looked_for_in_is_not_installed(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = [one for one in map(Requirement, project["dependencies"]) if one.name == name]
    installed = Version(importlib.metadata.version(name))
    assert installed in wanted.specifier
    following = f"{installed.major}.{installed.minor + 1}"
    assert following not in wanted.specifier, f"{wanted} admits {following}, which nobody has tried"
