"""One order of a mixed worker: a prefill's half and a decode's half that share the blocks of one cache. Pure."""

from __future__ import annotations

from halfmoon.schemas.decisions import StartDecode, StartMixed, StartPrefill
from halfmoon.schemas.policy import Layout
from halfmoon.workers.decode.sequence import DecodeSequence
from halfmoon.workers.model.prompt_rows import PromptScores
from halfmoon.workers.prefill.job import Job
from halfmoon.workers.prefill.stages import JobRules, PrefillStage
from halfmoon.workers.sample_requests import scores_of


class MixedRequest:
    """`job` takes the tokens, reserves slots of the node's pool and fetches; it ends with the first token. `sequence`
    has the blocks of the cache from the first chunk on, and all that was drawn.
    """

    def __init__(self, order: StartMixed, rules: JobRules, node_id: str, now_ns: int) -> None:
        self.order = order
        self.order_id = order.order_id
        self.job = Job(_prefill_half(order, node_id), rules, now_ns)
        self.sequence = DecodeSequence(decode_half(order), rules.layout, now_ns)
        #: The batch former has it.
        self.formed = False
        #: Its prompt is computed, and its first token was drawn.
        self.answered = False
        #: Output tokens that follow from the KV in the cache: fewer than all of them where the KV is computed anew.
        self.drawn = 0
        #: Blocks of the prompt that were copied to the node's pool.
        self.stored: set[int] = set()
        #: How likely the prompt's own tokens are, where that is wanted: the compute thread's, and looked at by nobody.
        self.scores: PromptScores | None = None
        #: Of iterations that computed its prompt, its part.
        self.compute_ns = 0

    def take(self, eos_ids: frozenset[int]) -> None:
        """The frontend's answer has come to the job."""
        self.sequence.take(self.job.reply, eos_ids)
        self.scores = scores_of(self.sequence.prompt, self.sequence.sampling.prompt_logprobs)

    @property
    def ready(self) -> bool:
        """It has all that its prompt is computed from."""
        return self.job.stage is PrefillStage.PREPARED and not self.job.fetching

    @property
    def cached_tokens(self) -> int:
        """Those of its prompt that are in slots of the node's pool that are leased to it."""
        return 0 if self.answered else self.job.prefix_blocks * self.job.rules.layout.block_tokens

    @property
    def position(self) -> int:
        """Where the KV of its next decode's token goes."""
        return len(self.sequence.prompt) + self.drawn - 1

    def blocks_max(self, layout: Layout) -> int:
        """With all that it may draw."""
        return layout.blocks(len(self.sequence.prompt) + self.sequence.max_tokens)


def _prefill_half(order: StartMixed, node_id: str) -> StartPrefill:
    return StartPrefill(
        order_id=order.order_id,
        request_id=order.request_id,
        frontend_id=order.frontend_id,
        worker_id=order.worker_id,
        decode_worker_id=order.worker_id,
        decode_node_id=node_id,
        prompt_tokens=order.prompt_tokens,
        local_blocks=order.local_blocks,
        fetches=order.fetches,
        predicted=order.predicted,
        weight_version=order.weight_version,
    )


def decode_half(order: StartMixed) -> StartDecode:
    return StartDecode(
        order_id=order.order_id,
        request_id=order.request_id,
        frontend_id=order.frontend_id,
        worker_id=order.worker_id,
        prefill_worker_id=order.worker_id,
        prompt_tokens=order.prompt_tokens,
        max_tokens=order.max_tokens,
        tbt_slo_ns=0,
        placement=order.placement,
        predicted=order.predicted,
        weight_version=order.weight_version,
    )
