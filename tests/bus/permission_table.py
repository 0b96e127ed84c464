"""Who may say and hear what on NATS, written down apart from the code that gives the permissions.

A row is a subject and the roles that may. `*` and `>` are NATS' own; <me> is the process that speaks, <node> the node
that its store agent or worker is of, <tenant> the tenant whose client it is. What no row allows is refused.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

#: Published.
SAYS = """
halfmoon.v1.*                              client operator
halfmoon.v1.*.<tenant>                     tenant
$SRV.>                                     client operator

halfmoon.events.<me>.ClusterConfigured     conductor supervisor
halfmoon.events.<me>.TimerFired            conductor
halfmoon.events.<me>.StateDigested         conductor
halfmoon.events.<me>.PolicyChanged         operator
halfmoon.events.<me>.RoleWanted            operator
halfmoon.events.<me>.PlacementsPaused      operator
halfmoon.events.<me>.WeightsChanged        operator
halfmoon.events.<me>.FrontendJoined        frontend
halfmoon.events.<me>.FrontendHeartbeat     frontend
halfmoon.events.<me>.FrontendLeft          frontend supervisor
halfmoon.events.<me>.RequestArrived        frontend
halfmoon.events.<me>.RequestCancelled      frontend
halfmoon.events.<me>.WorkerJoined          prefill decode attention mixed adapt
halfmoon.events.<me>.WorkerHeartbeat       prefill decode attention mixed adapt
halfmoon.events.<me>.WorkerDraining        prefill decode attention mixed adapt
halfmoon.events.<me>.WorkerLeft            prefill decode attention supervisor mixed adapt
halfmoon.events.<me>.PrefillFinished       prefill mixed adapt
halfmoon.events.<me>.PrefillFailed         prefill mixed adapt
halfmoon.events.<me>.StageFinished         prefill
halfmoon.events.<me>.DecodeStarted         decode adapt
halfmoon.events.<me>.DecodeRefused         decode
halfmoon.events.<me>.DecodeFailed          decode adapt
halfmoon.events.<me>.RequestFinished       prefill decode mixed adapt
halfmoon.events.<me>.KvMoved               decode
halfmoon.events.<me>.KvMoveRefused         decode
halfmoon.events.<node>.StoreJoined         store adapt
halfmoon.events.<node>.StoreHeartbeat      store adapt
halfmoon.events.<node>.StoreLeft           store adapt
halfmoon.events.<me>.StoreLeft             supervisor
halfmoon.events.<node>.StoreInventory      store adapt
halfmoon.events.<node>.BlocksStored        store adapt
halfmoon.events.<node>.BlocksEvicted       store adapt
halfmoon.events.<node>.TierLost            store
halfmoon.events.<node>.StoreSuspected      store

halfmoon.decisions.>                       conductor
halfmoon.snapshots.>                       conductor
halfmoon.kv.*.TransferOpened.<node>        store
halfmoon.kv.*.TransferFailed.<node>        store
halfmoon.kv.*.TransferFailed.<me>          engine
halfmoon.kv.*.KvReady.<node>               store
halfmoon.kv.*.KvLoaded.<node>              store
halfmoon.kv.*.PrefillResult.<me>           prefill adapt
halfmoon.kv.*.KvPromised.<me>              adapt

halfmoon.give.*.<me>                       frontend
halfmoon.relay.*.<me>                      frontend
halfmoon.forward.*.<me>                    adapt
halfmoon.resend.*.<me>                     frontend
halfmoon.hold.*.<me>                       decode
halfmoon.reset.*                           operator
halfmoon.cancel                            frontend
halfmoon.take.*.<me>                       prefill decode mixed adapt
halfmoon.tokens.*.<me>                     prefill decode mixed adapt

halfmoon.store.<node>.attach               prefill decode attention mixed engine
halfmoon.store.<node>.open_put             prefill decode attention mixed engine
halfmoon.store.<node>.fetch                prefill decode attention mixed engine
halfmoon.store.<node>.commit               prefill decode mixed engine
halfmoon.store.<node>.open_push            prefill decode engine
halfmoon.store.<node>.push                 prefill decode engine
halfmoon.store.<node>.keep                 prefill decode attention mixed engine
halfmoon.store.<node>.close_push           prefill decode engine
halfmoon.store.<node>.release              prefill decode attention mixed engine
halfmoon.store.<node>.status               prefill decode attention mixed engine
halfmoon.store.<node>.probe                engine
halfmoon.store.<node>.take                 engine
halfmoon.store.*.status                    operator store
halfmoon.store.*.drain                     operator
halfmoon.store.*.attach                    operator
halfmoon.store.*.take                      operator
halfmoon.store.*.keep                      operator
halfmoon.store.*.release                   operator
halfmoon.store.*.hello                     store
halfmoon.store.*.lease                     store
halfmoon.store.*.end_lease                 store
halfmoon.store.*.reserve                   store
halfmoon.store.*.renew                     store
halfmoon.store.*.settle                    store
halfmoon.store.*.drop                      store
halfmoon.store.*.pair                      store
halfmoon.store.*.probe                     store engine
halfmoon.store.*.replicate                 store
halfmoon.store.*.remove                    store

halfmoon.want.*.<me>                       engine
halfmoon.locate                            engine
halfmoon.status.conductors                 conductor frontend supervisor
halfmoon.status.*                          operator
halfmoon.view.conductors                   frontend
halfmoon.explain.*                         frontend

halfmoon.inbox.>                           conductor frontend store prefill decode attention mixed adapt engine
_INBOX.>                                   frontend

$JS.API.STREAM.INFO.EVENTS                 conductor frontend store prefill decode attention operator supervisor mixed
$JS.API.STREAM.INFO.EVENTS                 adapt engine
$JS.API.STREAM.INFO.DECISIONS              conductor frontend store prefill decode attention operator supervisor mixed
$JS.API.STREAM.INFO.DECISIONS              adapt engine
$JS.API.STREAM.INFO.KV                     conductor frontend store prefill decode attention operator supervisor mixed
$JS.API.STREAM.INFO.KV                     adapt engine
$JS.API.STREAM.INFO.SNAPSHOTS              conductor frontend store prefill decode attention operator supervisor mixed
$JS.API.STREAM.INFO.SNAPSHOTS              adapt engine
$JS.API.STREAM.CREATE.EVENTS               conductor supervisor
$JS.API.STREAM.CREATE.DECISIONS            conductor supervisor
$JS.API.STREAM.CREATE.KV                   conductor supervisor
$JS.API.STREAM.CREATE.SNAPSHOTS            conductor supervisor
$JS.API.STREAM.PURGE.SNAPSHOTS             conductor
$JS.API.STREAM.MSG.GET.EVENTS              conductor operator supervisor
$JS.API.STREAM.MSG.GET.DECISIONS           conductor operator frontend store prefill decode attention supervisor mixed
$JS.API.STREAM.MSG.GET.DECISIONS           adapt
$JS.API.STREAM.MSG.GET.KV                  operator frontend store prefill decode adapt
$JS.API.STREAM.MSG.GET.SNAPSHOTS           conductor operator supervisor
$JS.API.CONSUMER.CREATE.EVENTS             conductor operator supervisor
$JS.API.CONSUMER.DELETE.EVENTS.*           conductor operator supervisor
$JS.API.CONSUMER.CREATE.DECISIONS          operator
$JS.API.CONSUMER.DELETE.DECISIONS.*        operator
$JS.API.CONSUMER.CREATE.KV                 operator
$JS.API.CONSUMER.DELETE.KV.*               operator
$JS.API.CONSUMER.CREATE.SNAPSHOTS          operator
$JS.API.CONSUMER.DELETE.SNAPSHOTS.*        operator
$JS.FC.>                                   conductor operator supervisor
"""

#: Subscribed to.
HEARS = """
halfmoon.inbox.<me>.>                      conductor frontend store prefill decode attention supervisor mixed adapt
halfmoon.inbox.<me>.>                      engine
halfmoon.inbox.*.>                         operator
_INBOX.>                                   operator client
_INBOX.<tenant>.>                          tenant

halfmoon.v1.*                              frontend
halfmoon.v1.*.*                            frontend
$SRV.>                                     frontend
halfmoon.cancel                            frontend
halfmoon.take.<me>.*                       frontend
halfmoon.tokens.<me>.*                     frontend
halfmoon.forward.<me>.*                    frontend
halfmoon.relay.<me>.*                      adapt
halfmoon.decisions.<me>.>                  frontend prefill decode attention mixed adapt
halfmoon.decisions.*.*.<me>                frontend
halfmoon.give.<me>.*                       prefill decode mixed adapt
halfmoon.kv.<me>.>                         prefill decode adapt engine
halfmoon.want.<me>.*                       engine
halfmoon.kv.<me>.KvLoaded.<node>           mixed
halfmoon.resend.<me>.*                     prefill decode mixed adapt
halfmoon.hold.<me>.*                       decode attention
halfmoon.reset.<me>                        adapt

halfmoon.decisions.<node>.>                store
halfmoon.store.<node>.*                    store
halfmoon.events.*.StoreJoined              store

halfmoon.status.<me>                       conductor
halfmoon.status.conductors                 conductor
halfmoon.view.conductors                   conductor
halfmoon.explain.<me>                      conductor
halfmoon.locate                            conductor
"""


@dataclass(frozen=True)
class Process:
    """One that holds credentials. `node`: of a store agent and of a worker."""

    name: str
    role: str
    node: str = ""
    #: Of a client that is one tenant's.
    tenant: str = ""

    def may(self, table: str, subject: str) -> bool:
        """Whether a row of `table` lets this process use `subject`, which may hold wildcards itself."""
        given = subject.split(".")
        return any(_covers(row, given) for row in _rows(self, table))


def _covers(row: list[str], given: list[str]) -> bool:
    for at, token in enumerate(row):
        if token == ">":
            return len(given) > at
        # nats-server takes a subscription to `a.>` for `a.*`: nothing may lie deeper than a row that ends in `*`.
        if at == len(given) or token not in (given[at], "*"):
            return False
    return len(given) == len(row)


@functools.cache
def _rows(process: Process, table: str) -> list[list[str]]:
    """The tokens of each row that speaks of the process's role, with the process's own names."""
    named = (("<me>", process.name), ("<node>", process.node), ("<tenant>", process.tenant))
    found = []
    for line in filter(None, table.splitlines()):
        row, *roles = line.split()
        for name, value in named:
            row = row.replace(name, value)
        if process.role in roles:
            found.append(row.split("."))
    return found
