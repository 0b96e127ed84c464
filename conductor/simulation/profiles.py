"""Hardware profiles: the speeds of a worker, its memory and its links, each number with its source.

No number here was fitted to a result of the simulation. `halfmoon profile` measures the coefficients of a machine;
`load_profile` reads a file of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.policy import Layout


class ProfileInvalid(ValueError):
    """A profile that cannot be used; the text names the field."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker (one model replica) and its node. Times are ns (or ps, fs: see CostProfile), sizes bytes."""

    name: str
    cost: CostProfile
    layers: int
    kv_heads: int
    head_dim: int
    #: "bfloat16", "float16" or "float32".
    dtype: str = "bfloat16"
    #: Chunks of a prompt may be of any length where it is "fast".
    numerics: Literal["exact", "fast"] = "fast"
    #: Of the worker's own cache, after weights.
    kv_bytes: int
    #: Of the node's pool (DRAM).
    pool_bytes: int
    context_tokens_max: int = 262_144
    batch_max: int = 1_024
    #: Each node's network, in each direction; from pool to worker.
    link_bytes_s: int
    link_latency_ns: int = 0
    load_bytes_s: int
    #: Bytes of one token between two layers; 0: unknown, and no prompt is computed by several workers.
    activation_bytes: int = 0
    #: How many orders of a prefill worker have their KV fetched at a time.
    prepared_max: int = 3
    #: Where every number comes from.
    notes: list[str] = []

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers."""
        return (
            2
            * self.layers
            * self.kv_heads
            * self.head_dim
            * {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        )

    def load_ns(self, tokens: int) -> int:
        """Time to copy the KV of so many tokens from the node's pool to the worker."""
        return tokens * self.token_bytes * SECOND_NS // self.load_bytes_s

    def layout(self, block_tokens: int) -> Layout:
        return Layout(
            model=self.name,
            model_fingerprint=self.name,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_tokens=block_tokens,
            dtype=self.dtype,  # type: ignore[arg-type]
            numerics=self.numerics,
        )


# --- the papers' hardware -----------------------------------------------------------------------------------

#: Of peak FLOP/s in prefill, and of peak memory bandwidth in decode. The papers give peaks only. Taken for
#: tensor parallelism of 8; published runs of 70B models on A100 lie between 0.4 and 0.6, and at 0.75 to 0.85.
COMPUTE_SHARE, MEMORY_SHARE = 0.5, 0.8
#: One all-reduce of a small batch over NVLink, two in each layer.
ALL_REDUCE_NS = 20_000


def _node_of_eight(
    name: str, what: str, *, parameters: float, peak_flops: float, memory_bytes_s: float, network_bytes_s: int
) -> Profile:
    """LLaMA-70B on 8 GPUs: FAST eq. 1 for prefill, memory traffic for decode."""
    layers, width, kv_heads, head_dim, gpus = 80, 8_192, 8, 128, 8
    flops_s = gpus * peak_flops * COMPUTE_SHARE
    bytes_s = gpus * memory_bytes_s * MEMORY_SHARE
    weight_bytes = 2 * parameters
    token_bytes = 2 * layers * kv_heads * head_dim * 2
    weights_ns = weight_bytes / bytes_s * 1e9
    reduce_ns = 2 * layers * ALL_REDUCE_NS
    cost = CostProfile(
        prefill_base_ns=int(weights_ns + reduce_ns),
        prefill_per_token_ps=int(layers * 22 * width**2 / flops_s * 1e12),
        prefill_per_token2_fs=int(layers * 4 * width / flops_s * 1e15),
        decode_base_ns=int(weights_ns + reduce_ns),
        decode_per_sequence_ns=int(2 * parameters / flops_s * 1e9),
        decode_per_context_token_ps=int(token_bytes / bytes_s * 1e12),
    )
    kv_bytes = int(gpus * 80e9 * 0.9 - weight_bytes)
    return Profile(
        name=name,
        cost=cost,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        activation_bytes=2 * width,
        kv_bytes=kv_bytes,
        pool_bytes=3_000_000 * token_bytes,
        link_bytes_s=network_bytes_s,
        link_latency_ns=50_000,
        load_bytes_s=128_000_000_000,
        notes=[
            what,
            "prefill per token and per token squared: FAST eq. 1, flops = l(4 n² d + 22 n d²), l = 80, d = 8192, at "
            f"{COMPUTE_SHARE:.0%} of {gpus} × {peak_flops / 1e12:.0f} TFLOP/s (data sheet, bf16 dense); the share is "
            "assumed, the papers give none",
            f"base of prefill and of a step: all weights read once ({weight_bytes / 1e9:.0f} GB, bf16) at "
            f"{MEMORY_SHARE:.0%} of {gpus} × {memory_bytes_s / 1e12:.2f} TB/s (data sheet; share assumed), and "
            f"{2 * layers} all-reduces of {ALL_REDUCE_NS // 1_000} µs (assumed)",
            "a step per sequence: 2 FLOP a parameter, at the same share of peak",
            f"a step per context token: its KV ({token_bytes // 1024} KiB, FAST) read at the same memory bandwidth",
            f"KV of a worker: 90 % of {gpus} × 80 GB without the weights, {kv_bytes // token_bytes:,} tokens",
            "pool of a node: 3 M tokens, about 1 TB (FAST, section 4)",
            f"network {network_bytes_s * 8 / 1e9:.0f} Gb/s a node and 128 GB/s from host to device (FAST, table 2); "
            "latency 50 µs (assumed)",
        ],
    )


LLAMA3_A800 = _node_of_eight(
    "llama3-70b-8xa800",
    "LLaMA3-70B on 8 × A800-SXM4-80GB",
    parameters=70.55e9,
    peak_flops=312e12,
    memory_bytes_s=2.039e12,
    network_bytes_s=100_000_000_000,
)
LLAMA2_A800 = _node_of_eight(
    "llama2-70b-8xa800",
    "LLaMA2-70B on 8 × A800-SXM4-80GB",
    parameters=68.98e9,
    peak_flops=312e12,
    memory_bytes_s=2.039e12,
    network_bytes_s=100_000_000_000,
)
LLAMA3_H800 = _node_of_eight(
    "llama3-70b-8xh800",
    "LLaMA3-70B on 8 × H800-SXM5-80GB",
    parameters=70.55e9,
    peak_flops=989e12,
    memory_bytes_s=3.35e12,
    network_bytes_s=100_000_000_000,
)


def _two_a100() -> Profile:
    """LLaMA2-70B on 2 GPUs, decode alone: prefill is the other profile's, on a quarter of its GPUs."""
    gpus, token_bytes = 2, LLAMA2_A800.token_bytes
    weight_bytes, bytes_s = 2 * 68.98e9, 2 * 2.039e12 * MEMORY_SHARE
    cost = msgspec.structs.replace(
        LLAMA2_A800.cost,
        decode_base_ns=int(weight_bytes / bytes_s * 1e9) + 2 * LLAMA2_A800.layers * ALL_REDUCE_NS,
        decode_per_sequence_ns=LLAMA2_A800.cost.decode_per_sequence_ns * 8 // gpus,
        decode_per_context_token_ps=int(token_bytes / bytes_s * 1e12),
        prefill_base_ns=int(weight_bytes / bytes_s * 1e9) + 2 * LLAMA2_A800.layers * ALL_REDUCE_NS,
        prefill_per_token_ps=LLAMA2_A800.cost.prefill_per_token_ps * 8 // gpus,
        prefill_per_token2_fs=LLAMA2_A800.cost.prefill_per_token2_fs * 8 // gpus,
    )
    return msgspec.structs.replace(
        LLAMA2_A800,
        name="llama2-70b-2xa100",
        cost=cost,
        kv_bytes=int(gpus * 80e9 * 0.9 - weight_bytes),
        notes=[
            "LLaMA2-70B on 2 × A100-SXM4-80GB (2 TB/s, 312 TFLOP/s, as A800): an instance of Infinite-LLM",
            f"as {LLAMA2_A800.name}, with a quarter of its compute and memory bandwidth",
            "KV of a worker: 90 % of 2 × 80 GB without the weights",
        ],
    )


LLAMA2_TWO_A100 = _two_a100()

# --- this machine -------------------------------------------------------------------------------------------

SMOLLM2_CPU = Profile(
    name="smollm2-135m-cpu",
    cost=CostProfile(
        prefill_base_ns=29_000_000,
        prefill_per_token_ps=392_000_000,
        prefill_per_token2_fs=146_000_000,
        decode_base_ns=37_500_000,
        decode_per_sequence_ns=340_000,
        decode_per_context_token_ps=6_200_000,
    ),
    layers=30,
    kv_heads=3,
    head_dim=64,
    kv_bytes=512 * 256 * 23_040,
    pool_bytes=1024 * 256 * 23_040,
    context_tokens_max=8_192,
    batch_max=16,
    link_bytes_s=2_000_000_000,
    link_latency_ns=500_000,
    load_bytes_s=10_000_000_000,
    notes=[
        "SmolLM2-135M-Instruct, bf16, one thread of a 2-core machine without GPU",
        "costs: measured; prefill within 7 % up to 8,192 tokens",
        "network: loopback TCP, measured; memory: one memcpy, measured 12 GiB/s",
    ],
)

PROFILES = {
    profile.name: profile for profile in (LLAMA3_A800, LLAMA2_A800, LLAMA3_H800, LLAMA2_TWO_A100, SMOLLM2_CPU)
}
#: Short names that mean the same.
ALIASES = {"a800": LLAMA3_A800.name, "h800": LLAMA3_H800.name, "cpu": SMOLLM2_CPU.name}


def load_profile(name: str) -> Profile:
    """A shipped profile by its name, or one from a JSON file. Raises ProfileInvalid, OSError."""
    shipped = PROFILES.get(ALIASES.get(name, name))
    if shipped is not None:
        return shipped
    if not name.endswith(".json"):
        raise ProfileInvalid(f"profile {name}: there is {', '.join(PROFILES)}, or a .json file of one's own")
    try:
        profile = msgspec.json.decode(Path(name).read_bytes(), type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise ProfileInvalid(f"profile {name}: {problem}") from None
    for field in ("layers", "kv_heads", "head_dim", "kv_bytes", "pool_bytes", "link_bytes_s", "load_bytes_s"):
        if getattr(profile, field) <= 0:
            raise ProfileInvalid(f"profile {name}: {field} must be positive")
    if profile.dtype not in ("float32", "bfloat16", "float16"):
        raise ProfileInvalid(f"profile {name}: dtype {profile.dtype!r} is none of float32, bfloat16, float16")
    return profile
