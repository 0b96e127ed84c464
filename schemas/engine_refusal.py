"""An engine's refusal of a request, on its way from the worker to the client."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from halfmoon.schemas.types import Ns, Part, Text


class EngineRefusal(Part, frozen=True):
    """`status`: HTTP's, as the client gets it. `param`: the field of the request that is refused; "": none is named."""

    status: Annotated[int, Meta(ge=400, le=599)]
    param: Text = ""
    #: When to try again; 0: unknown.
    retry_after_ns: Ns = 0
