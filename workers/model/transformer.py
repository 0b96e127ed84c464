"""The layers of a llama-like transformer over rows of tokens: everything but attention and the cache.

A *row* is one token's hidden state; `x` is `[rows, hidden]`. In between stand the caller's attention and
cache, so that prefill and decode share one path. Norms and the rotary embedding are computed in f32 and
rounded once.
"""

from __future__ import annotations

import copy
import math

import torch

from halfmoon.workers.model.kernels.code import LANES
from halfmoon.workers.model.kernels.rows import RowKernels, row_kernels
from halfmoon.workers.model.linear import Linear
from halfmoon.workers.model.loading.config import ModelConfig

Tensor = torch.Tensor


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """f32 `[head_dim / 2]`, radians a position. Source: RoFormer, section 3.2; Llama 3.1's rope scaling."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_base**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        assert len(scaling.factors) == len(frequencies), (len(scaling.factors), len(frequencies))
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_context_tokens / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(
        wavelengths > scaling.original_context_tokens / low, frequencies / scaling.factor, frequencies
    )
    medium = (wavelengths <= scaling.original_context_tokens / low) & (
        wavelengths >= scaling.original_context_tokens / high
    )
    return torch.where(medium, between, scaled)


class Rotary:
    """Cosine and sine of positions, f32 `[positions, 1, head_dim / 2]`."""

    def __init__(self, config: ModelConfig, device: torch.device, positions: int) -> None:
        self._frequencies, self._device = rotary_frequencies(config), device
        self._compute(positions)

    def _compute(self, positions: int) -> None:
        self.positions = positions
        angles = torch.outer(torch.arange(positions).float(), self._frequencies)
        self._cos = angles.cos().unsqueeze(1).to(self._device)
        self._sin = angles.sin().unsqueeze(1).to(self._device)

    def reach(self, positions: int) -> None:
        """Makes the table longer where a sequence of `positions` tokens needs it."""
        if positions > self.positions:
            self._compute(max(positions, 2 * self.positions))

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._cos[positions], self._sin[positions]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`heads` `[rows, heads, head_dim]` turned by their positions: dimension i pairs with i + head_dim /
    2.
    """
    half = heads.shape[-1] // 2
    wide = heads.float()
    turned = torch.empty_like(wide, memory_format=torch.contiguous_format)
    a, b = wide[..., :half], wide[..., half:]
    torch.mul(a, cos, out=turned[..., :half]).addcmul_(b, sin, value=-1.0)
    torch.mul(b, cos, out=turned[..., half:]).addcmul_(a, sin)
    return turned.to(heads.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight` is f32."""
    wide = x.float()
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float, kernels: RowKernels | None) -> Tensor:
    return rms_norm(x, weight, eps) if kernels is None else kernels.norm(x, weight, eps)


class Layer:
    """The weights of one layer, packed."""

    def __init__(
        self, config: ModelConfig, weights: dict[str, Tensor], index: int, *, query_first: bool = False
    ) -> None:
        """`query_first`: q is a product of its own, so that `query` does not wait for k and v; the same bits, and a
        little slower in all.
        """
        name = f"layers.{index}"
        self._config, self._dtype = config, weights[f"{name}.qkv"].dtype
        self._attention_norm = weights[f"{name}.attention_norm"].float()
        self._ffn_norm = weights[f"{name}.ffn_norm"].float()
        wide, bias = weights[f"{name}.qkv"], weights.get(f"{name}.qkv_bias")
        cut = config.heads * config.head_dim if query_first else 0
        self._query = Linear(wide[:cut], None if bias is None else bias[:cut]) if cut else None
        #: Without those of `_query`.
        self._qkv = Linear(wide[cut:], None if bias is None else bias[cut:])
        self._out = Linear(weights[f"{name}.out"])
        self._gate_up = Linear(weights[f"{name}.gate_up"])
        self._down = Linear(weights[f"{name}.down"])
        self._kernels = _row_kernels(config, self._qkv, self._dtype)
        #: Of what products make, which the kernels round later.
        self._made_dtype = self._dtype if self._kernels is None else torch.float32

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q `[rows, heads, head_dim]`, rotated k and plain v `[rows, kv_heads, head_dim]`."""
        config = self._config
        if self._query is not None:
            q, normed = self.query(x, cos, sin)
            return q, *self.key_value(normed, cos, sin)
        turning = config.heads + config.kv_heads
        made = self._qkv(self._normed(x, self._attention_norm), self._made_dtype)
        turned, heads = self._turned(made, turning, cos, sin)
        return turned[:, : config.heads], turned[:, config.heads : turning], heads[:, turning:]

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """With `query_first`: rotated q, and the input of `key_value`."""
        assert self._query is not None, "query_first"
        normed = self._normed(x, self._attention_norm)
        made = self._query(normed, self._made_dtype)
        return self._turned(made, self._config.heads, cos, sin)[0], normed

    def key_value(self, normed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated k and plain v, after `query`."""
        turning = self._config.kv_heads
        turned, heads = self._turned(self._qkv(normed, self._made_dtype), turning, cos, sin)
        return turned[:, :turning], heads[:, turning:]

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return _normed(x, weight, self._config.rms_eps, self._kernels)

    def _turned(self, made: Tensor, turning: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """A product's heads `[rows, heads * head_dim]`: the first `turning` turned, and all that are not."""
        heads = made.view(len(made), -1, self._config.head_dim)
        if self._kernels is None:
            return rotate(heads[:, :turning], cos, sin), heads
        self._kernels.rotate(made, cos, sin, turning, self._config.head_dim)
        heads = heads.to(self._dtype)
        return heads, heads

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer after attention, whose result is `[rows, heads * head_dim]`; changes `x`."""
        config = self._config
        if self._kernels is not None:
            made = self._out(attended, self._made_dtype)
            normed = self._kernels.add_norm(x, made, self._ffn_norm, config.rms_eps)
            x += self._down(self._kernels.gate(self._gate_up(normed, self._made_dtype)), self._made_dtype)
            return x
        x += self._out(attended)
        gate_up = self._gate_up(rms_norm(x, self._ffn_norm, config.rms_eps))
        gate, up = gate_up[:, : config.intermediate], gate_up[:, config.intermediate :]
        x += self._down(torch.nn.functional.silu(gate).mul_(up))
        return x


def _row_kernels(config: ModelConfig, product: Linear, dtype: torch.dtype) -> RowKernels | None:
    """Beside products of the row kernel, where whole vectors make up a row."""
    widths = config.hidden, config.intermediate, config.head_dim // 2
    return (
        row_kernels(dtype)
        if product.kernel == "rows" and not any(width % LANES for width in widths)
        else None
    )


class Transformer:
    """A whole model on one device, without cache or attention. `positions`: tokens of the sequences to begin with."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        positions: int = 1,
        *,
        query_first: bool = False,
    ) -> None:
        self.config, self.query_first = config, query_first
        self._embed = weights["embed"]
        self.device, self.dtype = self._embed.device, self._embed.dtype
        self.layers = [Layer(config, weights, i, query_first=query_first) for i in range(config.layers)]
        self.rotary = Rotary(config, self.device, positions)
        self._norm = weights["norm"].float()
        self._head = Linear(weights["embed"] if config.tied else weights["head"])
        #: Of its products; all are of one device and dtype.
        self.kernel = self._head.kernel
        self._kernels = _row_kernels(config, self._head, self.dtype)

    def for_positions(self, positions: int) -> Transformer:
        """The same weights, not copied, for sequences of `positions` tokens to begin with."""
        other = copy.copy(self)
        other.rotary = Rotary(self.config, self.device, positions)
        return other

    def embed(self, token_ids: Tensor) -> Tensor:
        return torch.nn.functional.embedding(token_ids, self._embed)

    def logits(self, x: Tensor) -> Tensor:
        """f32 `[rows, vocab]`."""
        return self._head(_normed(x, self._norm, self.config.rms_eps, self._kernels), torch.float32)
