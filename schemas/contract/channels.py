"""The one table of subjects and their messages, from which the AsyncAPI document is made.

A test fails for a message of `halfmoon.schemas` that is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from halfmoon.schemas import (
    decisions,
    events,
    kv,
    lending,
    snapshots,
    status,
    store,
    subjects,
    tokens,
    view,
    weights,
)
from halfmoon.schemas.api import bodies, messages, responses
from halfmoon.schemas.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One subject, with `{names}` where it varies, and its messages. `replies` go to the request's inbox."""

    name: str
    address: str
    summary: str
    #: From the side of halfmoon as a whole: it serves a subject that it would `receive`.
    action: Literal["send", "receive"]
    messages: tuple[type, ...] = ()
    replies: tuple[type, ...] = ()
    #: Replies that are JSON of another dialect, in words.
    answered: str = ""


_REFUSAL = (tokens.ProcessError,)

_CLIENT_API: tuple[Channel, ...] = (
    Channel(
        name="generate",
        address=f"{subjects.API}.generate",
        summary="Complete a prompt.",
        action="receive",
        messages=(bodies.CompletionBody,),
        answered="An OpenAI completion; with `stream`, any number of chunks and a last one. Errors: `{error: {...}}`.",
    ),
    Channel(
        name="chat",
        address=f"{subjects.API}.chat",
        summary="Answer a conversation.",
        action="receive",
        messages=(bodies.ChatBody,),
        answered="An OpenAI chat completion, or chunks of one, as for `generate`. Errors: `{error: {...}}`.",
    ),
    Channel(
        name="tokenize",
        address=f"{subjects.API}.tokenize",
        summary="The token ids of a text or a conversation.",
        action="receive",
        messages=(bodies.TokenizeBody,),
        answered="`{tokens, count, max_model_len}`.",
    ),
    Channel(
        name="cancel",
        address=f"{subjects.API}.cancel",
        summary="Nothing more of a request is wanted.",
        action="receive",
        messages=(bodies.CancelBody,),
        answered="Whether there was such a request.",
    ),
    Channel(
        name="models",
        address=f"{subjects.API}.models",
        summary="The models that are served. No body.",
        action="receive",
        answered="An OpenAI model list.",
    ),
    Channel(
        name="clusterStatus",
        address=f"{subjects.API}.status",
        summary="How the cluster is. No body.",
        action="receive",
        answered="What `halfmoon status --json` prints.",
    ),
)

_TENANTS_API = tuple(
    replace(
        channel,
        name=f"{channel.name}OfTenant",
        address=f"{channel.address}.{{tenant}}",
        summary=f"{channel.summary} For clients whose credentials are one tenant's.",
    )
    for channel in _CLIENT_API
)

_PROCESSES: tuple[Channel, ...] = (
    Channel(
        name="events",
        address=subjects.event("{source_id}", "{type}"),
        summary=f"Facts for the conductor, stored in the {subjects.EVENTS_STREAM} stream. `type` names the class.",
        action="send",
        messages=events.EVENT_TYPES,
    ),
    Channel(
        name="decisions",
        address=subjects.decision("{target_id}", "{type}"),
        summary=f"Orders of the conductor, stored in the {subjects.DECISIONS_STREAM} stream, each inside `Ordered`.",
        action="send",
        messages=tuple(
            kind
            for kind in decisions.DECISION_TYPES
            if kind not in (decisions.SetTimer, decisions.StartPrefill)
        ),
    ),
    Channel(
        name="kv",
        address=subjects.kv("{worker_id}", "{type}", "{author_id}"),
        summary=f"Progress of a transfer, for the worker that waits, in the {subjects.KV_STREAM} stream.",
        action="send",
        messages=kv.KV_TYPES,
    ),
    Channel(
        name="placements",
        address=subjects.decision("{target_id}", decisions.StartPrefill.__name__, "{frontend_id}"),
        summary="A placement, inside `Ordered`, as the prefill worker and the request's frontend hear it.",
        action="send",
        messages=(decisions.StartPrefill,),
    ),
    Channel(
        name="give",
        address=subjects.give("{worker_id}", "{frontend_id}"),
        summary="A frontend gives both workers of a placement the request's tokens.",
        action="send",
        messages=(tokens.TokensGiven, tokens.DecodeGiven),
    ),
    Channel(
        name="snapshots",
        address=subjects.snapshot("{seq}", "{digest}", "{part}"),
        summary=f"A conductor's state, in parts of bytes, in the {subjects.SNAPSHOTS_STREAM} stream; `head` ends it.",
        action="send",
        messages=(snapshots.SnapshotHead,),
    ),
    Channel(
        name="take",
        address=subjects.take("{frontend_id}", "{worker_id}"),
        summary="A worker that was given no tokens asks the frontend for them.",
        action="receive",
        messages=(tokens.TakeRequest,),
        replies=(tokens.TakeReply, *_REFUSAL),
    ),
    Channel(
        name="tokens",
        address=subjects.tokens("{frontend_id}", "{worker_id}"),
        summary="Sampled tokens, one message a decode step for all sequences of the frontend.",
        action="send",
        messages=(tokens.TokensSampled,),
    ),
    Channel(
        name="forward",
        address=subjects.forward("{frontend_id}", "{worker_id}"),
        summary="An adapter names the engine that a gateway is to take a request to.",
        action="send",
        messages=(tokens.EngineNamed,),
    ),
    Channel(
        name="relay",
        address=subjects.relay("{worker_id}", "{frontend_id}"),
        summary="A frontend passes on what an engine answers through a gateway.",
        action="send",
        messages=(tokens.AnswerRelayed,),
    ),
    Channel(
        name="resend",
        address=subjects.resend("{worker_id}", "{frontend_id}"),
        summary="A frontend asks a decode worker for tokens that it missed.",
        action="receive",
        messages=(tokens.ResendRequest,),
        replies=(tokens.ResendReply, *_REFUSAL),
    ),
    Channel(
        name="hold",
        address=subjects.hold("{worker_id}", "{owner_id}"),
        summary="A decode worker asks another to hold, and to attend to, segments of its sequence.",
        action="receive",
        messages=(lending.HoldRequest,),
        replies=(lending.HoldReply, *_REFUSAL),
    ),
    Channel(
        name="want",
        address=subjects.want("{worker_id}", "{asker_id}"),
        summary="An engine's connector wants the KV of a prompt that another engine computes.",
        action="receive",
        messages=(kv.WantKv,),
        replies=(store.Done, *_REFUSAL),
    ),
    Channel(
        name="reset",
        address=subjects.reset("{worker_id}"),
        summary="An operator has the engine behind an adapter drop its prefix cache.",
        action="receive",
        messages=(weights.ResetPrefixCache,),
        replies=(weights.PrefixCacheReset, *_REFUSAL),
    ),
    Channel(
        name="status",
        address=subjects.status("{process_id}"),
        summary="How a process is, and what a conductor knows of the cluster.",
        action="receive",
        messages=(status.StatusRequest,),
        replies=(status.ConductorStatus, *_REFUSAL),
    ),
    Channel(
        name="view",
        address=subjects.view(subjects.CONDUCTORS),
        summary="What the cluster's page shows, asked by a frontend while somebody looks. Every conductor answers.",
        action="receive",
        messages=(view.ViewRequest,),
        replies=(view.ClusterView,),
    ),
    Channel(
        name="locate",
        address=subjects.locate(),
        summary="Which nodes have blocks, by the log. One conductor answers.",
        action="receive",
        messages=(view.LocateBlocks,),
        replies=(view.BlocksLocated,),
    ),
    Channel(
        name="explain",
        address=subjects.explain("{conductor_id}"),
        summary="Why a request went where it went: every candidate, and what then happened.",
        action="receive",
        messages=(view.ExplainRequest,),
        replies=(view.Explained, *_REFUSAL),
    ),
)

#: Verb of a store agent, its request, its answer (None: published, not answered).
_STORE_VERBS: tuple[tuple[str, type[Message], type[Message] | None], ...] = (
    ("attach", store.Attach, store.Attached),
    ("open_put", store.OpenPut, store.PutOpened),
    ("fetch", store.FetchBlocks, store.Fetched),
    ("commit", store.CommitBlocks, store.Done),
    ("open_push", store.OpenPush, store.Done),
    ("push", store.PushLayers, None),
    ("keep", store.KeepOrders, None),
    ("close_push", store.ClosePush, store.Pushed),
    ("release", store.ReleaseBlocks, store.Done),
    ("status", store.StoreStatusRequest, store.StoreStatus),
    ("probe", store.ProbeBlocks, store.Probed),
    ("take", store.TakeBlocks, store.Taken),
    ("remove", store.RemoveBlocks, store.Removed),
    ("pin", store.PinBlocks, store.Done),
    ("hello", store.Hello, store.Hello),
    ("lease", store.LeaseBlocks, store.Leased),
    ("end_lease", store.EndLease, store.LeaseEnded),
    ("reserve", store.ReserveBlocks, store.Reserved),
    ("renew", store.RenewBlocks, store.Done),
    ("settle", store.SettleBlocks, store.Done),
    ("drop", store.DropBlocks, store.Done),
    ("pair", store.QueuePair, store.QueuePair),
    ("replicate", store.Replicate, store.Replicated),
    ("drain", store.DrainStore, store.Drained),
)


def _store_channel(verb: str, asked: type[Message], answered: type[Message] | None) -> Channel:
    return Channel(
        name="store" + verb.title().replace("_", ""),
        address=subjects.store("{node_id}", verb),
        summary=f"Control of a store agent: `{verb}`.",
        action="receive",
        messages=(asked,),
        replies=() if answered is None else (answered, *_REFUSAL),
    )


CHANNELS: tuple[Channel, ...] = (
    *_CLIENT_API,
    *_TENANTS_API,
    *_PROCESSES,
    *(_store_channel(*verb) for verb in _STORE_VERBS),
)

#: Messages with no channel of their own, and why.
WITHOUT_CHANNEL: dict[type, str] = {
    decisions.Ordered: "the envelope of every decision",
    lending.JoinedHolder: "the beginning of WorkerJoined",
    decisions.SetTimer: "for the conductors' own shells; never published",
    bodies.DetokenizeBody: "over HTTP only",
    messages.CountTokensBody: "over HTTP only",
    messages.MessagesBody: "over HTTP only",
    responses.ResponsesBody: "over HTTP only",
    view.ConductorView: "the beginning of every ClusterView",
}
