"""A client of the NATS API, for the commands: one answer, or a stream."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson

from halfmoon.bus.errors import BusUnreachable
from halfmoon.cli.lean_nats import Client, MaxPayloadError, Msg, NatsError, NoRespondersError, nats
from halfmoon.cli.options import OptionInvalid, bus_config
from halfmoon.schemas import subjects

#: A frontend sends something on every open stream more often than this (empty chunks, when nothing else).
SILENCE_S_MAX = 10.0


class ApiFailure(Exception):
    """The API's answer was an error, or there was none. `status` as in HTTP."""

    def __init__(self, status: int, message: str, body: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = body or {
            "error": {"message": message, "type": "client_error", "param": None, "code": None}
        }


def add_tenant(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nats-tenant", default="", metavar="NAME", help="whose client this is, by its credentials"
    )


@contextlib.asynccontextmanager
async def api_client(args: argparse.Namespace, tenant: str = "") -> AsyncIterator[ApiClient]:
    """Connected as the options of `add_bus` say. `tenant`: whose client it is; "": any's. Raises BusUnreachable,
    OptionInvalid.
    """
    if tenant and not re.fullmatch(subjects.TENANT, tenant):
        raise OptionInvalid(f"--nats-tenant {tenant!r}: letters, digits, - and _, at most 64")
    config = bus_config(args)

    async def quiet(_: Exception) -> None:
        # An error comes back as an exception.
        return

    options: dict[str, Any] = {
        "servers": [url.strip() for url in config.url.split(",")],
        "name": "halfmoon-cli",
        "connect_timeout": 2,
        "max_reconnect_attempts": 3,
        "reconnect_time_wait": 0.2,
        "error_cb": quiet,
        "user": config.user or None,
        "password": config.password or None,
        "token": config.token or None,
        "nkeys_seed": config.nkey_seed_file or None,
        "user_credentials": config.credentials_file or None,
    }
    if tenant:
        options["inbox_prefix"] = subjects.tenant_inbox(tenant)
    if (tls := config.tls()) is not None:
        options["tls"] = tls
    try:
        nc = await asyncio.wait_for(nats.connect(allow_reconnect=False, **options), config.connect_timeout_s)
    except (NatsError, OSError, TimeoutError) as problem:
        reason = str(problem) or type(problem).__name__
        raise BusUnreachable(f"no NATS server takes us at {config.url}: {reason}") from None
    try:
        yield ApiClient(nc, tenant)
    finally:
        await nc.close()


class ApiClient:
    """`call` and `stream` raise ApiFailure."""

    def __init__(self, nc: Client, tenant: str = "") -> None:
        self._nc = nc
        self._tenant = tenant

    async def call(self, name: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """One answer of the endpoint `name`."""
        try:
            reply = await self._nc.request(
                subjects.api(name, self._tenant), orjson.dumps(body), timeout=timeout_s
            )
        except NoRespondersError:
            raise ApiFailure(503, "no frontend answers: is the cluster up?") from None
        except MaxPayloadError:
            raise _too_large(self._nc) from None
        except (NatsError, TimeoutError):
            raise ApiFailure(504, f"no answer within {timeout_s:g} s") from None
        return _read(reply)

    async def stream(self, name: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Chunks as they come, and the whole answer last (`done`). Leaving early ends the request."""
        inbox = self._nc.new_inbox()
        subscription = await self._nc.subscribe(inbox)
        try:
            payload = orjson.dumps({**body, "stream": True})
            await self._nc.publish(subjects.api(name, self._tenant), payload, reply=inbox)
            heard_at = time.monotonic()
            while True:
                try:
                    message = await subscription.next_msg(timeout=SILENCE_S_MAX)
                except (NatsError, TimeoutError):
                    silence_s = time.monotonic() - heard_at
                    raise ApiFailure(
                        504, f"nothing was heard for {silence_s:.0f} s: the frontend is gone"
                    ) from None
                heard_at = time.monotonic()
                chunk = _read(message)
                yield chunk
                if chunk.get("done"):
                    return
        except MaxPayloadError:
            raise _too_large(self._nc) from None
        finally:
            if not self._nc.is_closed:
                await subscription.unsubscribe()
                await self._nc.flush()


def _read(message: Msg) -> dict[str, Any]:
    headers = message.headers or {}
    if headers.get("Status") == "503":
        raise ApiFailure(503, "no frontend answers: is the cluster up?")
    content: dict[str, Any] = orjson.loads(message.data)
    if "error" in content:
        code = headers.get("Nats-Service-Error-Code", "500")
        raise ApiFailure(int(code), content["error"]["message"], content)
    return content


def _too_large(nc: Client) -> ApiFailure:
    return ApiFailure(
        413, f"the request is larger than the NATS server's max_payload of {nc.max_payload} bytes"
    )
