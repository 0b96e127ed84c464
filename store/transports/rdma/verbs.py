"""The part of pyverbs that is used: one opened port, its completions as events of a file descriptor, registered
memory, and reliable connected (RC) queue pairs.

pyverbs comes with the distribution's rdma-core or from a package index (`pip install halfmoon[rdma]`), and is
imported when a port is opened, not before. It does not let go of the interpreter lock, so that nothing here
may wait: the completion channel is made non-blocking and watched by the event loop.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from halfmoon.store.errors import TransferError
from halfmoon.store.transports.rdma.device import Port, RdmaAbsent

#: Of a queue pair: work requests it can hold, and receives.
SENDS, RECEIVES = 352, 16
#: A packet without an answer is sent again after 4.096 µs · 2^14 = 67 ms, six times: a dead peer shows in
#: half a second. Seven would mean for ever on some devices; so would it for a peer that has posted no
#: receive.
ACK_TIMEOUT, RETRIES, RNR_RETRIES, RNR_TIMER = 14, 6, 6, 12
READS_UNDER_WAY = 16
EVENT_FD = "anon_inode:[infinibandevent]"
_making_channel = threading.Lock()


class Completion(NamedTuple):
    """`problem` is "" for success; `immediate` counts only for a receive."""

    wr_id: int
    problem: str
    immediate: int


class Memory(NamedTuple):
    """Registered memory of this process: address, bytes, the device's keys for itself and for others."""

    address: int
    size: int
    lkey: int
    rkey: int


def load() -> Any:
    """pyverbs' modules. Raises RdmaAbsent."""
    try:
        import pyverbs.addr
        import pyverbs.cq
        import pyverbs.device
        import pyverbs.enums
        import pyverbs.mr
        import pyverbs.pd
        import pyverbs.pyverbs_error
        import pyverbs.qp
        import pyverbs.wr
    except (ImportError, OSError) as problem:
        raise RdmaAbsent(f"pyverbs cannot be imported: {problem}") from None
    return SimpleNamespace(
        addr=pyverbs.addr,
        cq=pyverbs.cq,
        device=pyverbs.device,
        e=pyverbs.enums,
        mr=pyverbs.mr,
        pd=pyverbs.pd,
        qp=pyverbs.qp,
        wr=pyverbs.wr,
        Error=pyverbs.pyverbs_error.PyverbsError,
    )


class Verbs:
    """One opened port. `fd` is readable when `completions` has something to give."""

    def __init__(self, port: Port, *, pairs_max: int) -> None:
        """Raises RdmaAbsent."""
        self._pv = pv = load()
        self.port = port
        self._regions: list[Any] = []
        errors = [name for name in dir(pv.e) if name.startswith("IBV_WC_") and name.endswith("_ERR")]
        self._statuses = {getattr(pv.e, name): name.removeprefix("IBV_WC_") for name in errors}
        try:
            self._context = pv.device.Context(name=port.device)
            limits = self._context.query_device()
            self.mtu = min(port.mtu, 128 << int(self._context.query_port(port.number).active_mtu))
            self.sends = min(SENDS, limits.max_qp_wr)
            #: Queue pairs for whose completions there is room, failed ones included.
            self.pairs_max = min(pairs_max, limits.max_cqe // (self.sends + RECEIVES))
            self._reads = max(1, min(READS_UNDER_WAY, limits.max_qp_rd_atom, limits.max_qp_init_rd_atom))
            self._domain = pv.pd.PD(self._context)
            self._channel, self.fd = self._make_channel()
            entries = self.pairs_max * (self.sends + RECEIVES)
            self.queue = pv.cq.CQ(self._context, entries, None, self._channel, 0)
            self.queue.req_notify()
        except pv.Error as problem:
            raise RdmaAbsent(f"cannot use {port.device}: {problem}") from None

    def _make_channel(self) -> tuple[Any, int]:
        """pyverbs keeps the channel's descriptor to itself: it is the one that was not there before."""
        with _making_channel:
            before = _event_fds()
            channel = self._pv.cq.CompChannel(self._context)
            (fd,) = _event_fds() - before
        os.set_blocking(fd, False)
        return channel, fd

    def access(self) -> int:
        e = self._pv.e
        return int(e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ)

    def register(self, address: int, size: int) -> Memory:
        """Raises RdmaAbsent: the memory may not be locked."""
        try:
            region = self._pv.mr.MR(self._domain, size, self.access(), address=address)
        except self._pv.Error as problem:
            raise RdmaAbsent(
                f"{self.port.device} cannot register {size >> 20} MiB (is `ulimit -l` large enough?): {problem}"
            ) from None
        self._regions.append(region)
        return Memory(address, size, region.lkey, region.rkey)

    def completions(self) -> list[Completion]:
        """Takes finished work requests. Asks for the next event first, so that none is missed."""
        # The error is an empty channel: its event was taken before.
        with contextlib.suppress(self._pv.Error):
            self._channel.get_cq_event(self.queue)
            self.queue.ack_events(1)
        self.queue.req_notify()
        found = []
        while True:
            count, some = self.queue.poll(64)
            for one in some:
                problem = (
                    ""
                    if one.status == self._pv.e.IBV_WC_SUCCESS
                    else self._statuses.get(one.status, "unknown")
                )
                found.append(Completion(one.wr_id, problem, 0 if problem else one.imm_data))
            if count < 64:
                return found

    def pair(self) -> QueuePairHandle:
        """Raises TransferError."""
        return QueuePairHandle(self, self._pv, self._domain, self._reads)

    def close(self) -> None:
        """Queue pairs, memory, device, in this order. Idempotent."""
        with contextlib.suppress(self._pv.Error):  # a device that is gone takes all of it along
            self.queue.close()
            self._channel.close()
            for region in self._regions:
                region.close()
            self._domain.close()
            self._context.close()
        self._regions.clear()


class QueuePairHandle:
    """One end of an RC connection: made, connected to the other end, posted to, closed. Raises TransferError."""

    def __init__(self, verbs: Verbs, pv: Any, domain: Any, reads: int) -> None:
        self._verbs = verbs
        self._pv = pv
        self._reads = reads
        self.psn = secrets.randbits(24)
        e, port = pv.e, verbs.port
        cap = pv.qp.QPCap(max_send_wr=verbs.sends, max_recv_wr=RECEIVES, max_send_sge=1, max_recv_sge=1)
        init = pv.qp.QPInitAttr(qp_type=e.IBV_QPT_RC, scq=verbs.queue, rcq=verbs.queue, cap=cap, sq_sig_all=0)
        try:
            self._qp = pv.qp.QP(domain, init)
            attr = pv.qp.QPAttr(qp_state=e.IBV_QPS_INIT)
            attr.port_num, attr.pkey_index, attr.qp_access_flags = port.number, 0, verbs.access()
            mask = e.IBV_QP_STATE | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS | e.IBV_QP_PKEY_INDEX
            self._qp.modify(attr, mask)
        except pv.Error as problem:
            raise TransferError(f"no queue pair on {port.device}: {problem}") from None
        self.number: int = self._qp.qp_num

    def connect(self, *, qpn: int, psn: int, gid: str, lid: int, mtu: int) -> None:
        """To the other end, as its own message describes it."""
        pv, e, port = self._pv, self._pv.e, self._verbs.port
        try:
            attr = pv.qp.QPAttr(qp_state=e.IBV_QPS_RTR)
            route = pv.addr.GlobalRoute(dgid=pv.addr.GID(gid), sgid_index=port.gid_index)
            attr.ah_attr = pv.addr.AHAttr(
                gr=route, is_global=int(port.ethernet), port_num=port.number, dlid=lid
            )
            attr.path_mtu = (mtu >> 7).bit_length() - 1
            attr.dest_qp_num, attr.rq_psn = qpn, psn
            attr.max_dest_rd_atomic, attr.min_rnr_timer = self._reads, RNR_TIMER
            ready_to_receive = e.IBV_QP_AV | e.IBV_QP_PATH_MTU | e.IBV_QP_DEST_QPN | e.IBV_QP_RQ_PSN
            ready_to_receive |= e.IBV_QP_STATE | e.IBV_QP_MAX_DEST_RD_ATOMIC | e.IBV_QP_MIN_RNR_TIMER
            self._qp.modify(attr, ready_to_receive)
            attr = pv.qp.QPAttr(qp_state=e.IBV_QPS_RTS)
            attr.sq_psn, attr.timeout, attr.retry_cnt, attr.rnr_retry = (
                self.psn,
                ACK_TIMEOUT,
                RETRIES,
                RNR_RETRIES,
            )
            attr.max_rd_atomic = self._reads
            ready_to_send = e.IBV_QP_STATE | e.IBV_QP_SQ_PSN | e.IBV_QP_TIMEOUT | e.IBV_QP_RETRY_CNT
            self._qp.modify(attr, ready_to_send | e.IBV_QP_RNR_RETRY | e.IBV_QP_MAX_QP_RD_ATOMIC)
        # OverflowError: a number of the other end is wider than the hardware's.
        except (pv.Error, ValueError, OverflowError) as problem:
            raise TransferError(f"cannot connect a queue pair of {port.device} to {gid}: {problem}") from None

    def read(
        self, wr_id: int, local: Memory, at: int, remote: tuple[int, int], size: int, *, last: bool
    ) -> None:
        """Posts a one-sided READ from `remote` (address, rkey) to `at` in `local`; only the last one
        completes.
        """
        self._post(self._pv.e.IBV_WR_RDMA_READ, wr_id, self._piece(local, at, size), remote, signalled=last)

    def write(
        self,
        wr_id: int,
        local: Memory,
        at: int,
        remote: tuple[int, int],
        size: int,
        *,
        immediate: int | None = None,
    ) -> None:
        """Posts a one-sided WRITE. One with an immediate completes, here and as a receive at the other end."""
        e = self._pv.e
        opcode = e.IBV_WR_RDMA_WRITE if immediate is None else e.IBV_WR_RDMA_WRITE_WITH_IMM
        piece, signalled = self._piece(local, at, size), immediate is not None
        self._post(opcode, wr_id, piece, remote, immediate or 0, signalled=signalled)

    def receive(self, wr_id: int, local: Memory, at: int) -> None:
        """Posts a receive: it takes one immediate. Its own memory is not written."""
        pv = self._pv
        try:
            self._qp.post_recv(pv.wr.RecvWR(wr_id=wr_id, num_sge=1, sg=[pv.wr.SGE(at, 8, local.lkey)]))
        except pv.Error as problem:
            raise TransferError(f"cannot post a receive: {problem}") from None

    def close(self) -> None:
        """Destroys it: afterwards the device touches nothing on its behalf. Idempotent."""
        with contextlib.suppress(self._pv.Error):
            self._qp.close()

    def _piece(self, local: Memory, at: int, size: int) -> Any:
        return self._pv.wr.SGE(at, size, local.lkey)

    def _post(
        self,
        opcode: int,
        wr_id: int,
        piece: Any,
        remote: tuple[int, int],
        immediate: int = 0,
        *,
        signalled: bool,
    ) -> None:
        pv = self._pv
        flags = pv.e.IBV_SEND_SIGNALED if signalled else 0
        request = pv.wr.SendWR(
            wr_id=wr_id, opcode=opcode, num_sge=1, imm_data=immediate, sg=[piece], send_flags=flags
        )
        address, rkey = remote
        try:
            request.set_wr_rdma(rkey, address)
            self._qp.post_send(request)
        except (pv.Error, OverflowError) as problem:
            raise TransferError(f"cannot post a work request: {problem}") from None


def _event_fds() -> set[int]:
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(path) == EVENT_FD:
                found.add(int(path.name))
    return found
