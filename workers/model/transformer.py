"""The layers of a llama-like transformer over rows of tokens: everything but attention and the cache.

A *row* is one token's hidden state; `x` is `[rows, hidden]`. In between stand the caller's attention and
cache, so that prefill and decode share one path. Norms and the rotary embedding are computed in f32 and
rounded once.
"""

from __future__ import annotations

import math

import torch

from halfmoon.workers.model.config import ModelConfig
from halfmoon.workers.model.linear import Linear

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
        """Makes the table longer where a sequence of so many tokens needs it."""
        if positions > self.positions:
            self._compute(max(positions, 2 * self.positions))

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._cos[positions], self._sin[positions]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`heads` `[rows, heads, head_dim]` turned by their positions: dimension i pairs with i + head_dim /
    2.
    """
    half = heads.shape[-1] // 2
    turned = torch.empty_like(heads, memory_format=torch.contiguous_format)
    wide = heads.float()
    a, b = wide[..., :half], wide[..., half:]
    turned[..., :half] = torch.addcmul(a * cos, b, sin, value=-1.0)
    turned[..., half:] = torch.addcmul(b * cos, a, sin)
    return turned


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight` is f32."""
    wide = x.float()
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


class Layer:
    """The weights of one layer, packed."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], index: int) -> None:
        name = f"layers.{index}"
        self._config = config
        self._attention_norm = weights[f"{name}.attention_norm"].float()
        self._ffn_norm = weights[f"{name}.ffn_norm"].float()
        self._qkv = Linear(weights[f"{name}.qkv"], weights.get(f"{name}.qkv_bias"))
        self._out = Linear(weights[f"{name}.out"])
        self._gate_up = Linear(weights[f"{name}.gate_up"])
        self._down = Linear(weights[f"{name}.down"])

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q `[rows, heads, head_dim]`, rotated k and plain v `[rows, kv_heads, head_dim]`."""
        config = self._config
        qkv = self._qkv(rms_norm(x, self._attention_norm, config.rms_eps))
        heads = qkv.view(x.shape[0], config.heads + 2 * config.kv_heads, config.head_dim)
        turning = config.heads + config.kv_heads
        turned = rotate(heads[:, :turning], cos, sin)
        return turned[:, : config.heads], turned[:, config.heads :], heads[:, turning:]

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer after attention, whose result is `[rows, heads * head_dim]`; changes `x`."""
        config = self._config
        x += self._out(attended)
        gate_up = self._gate_up(rms_norm(x, self._ffn_norm, config.rms_eps))
        gate, up = gate_up[:, : config.intermediate], gate_up[:, config.intermediate :]
        x += self._down(torch.nn.functional.silu(gate).mul_(up))
        return x


class Transformer:
    """A whole model on one device, without cache or attention. `positions`: tokens of the sequences to begin with."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], positions: int) -> None:
        self.config = config
        self._embed = weights["embed"]
        self.device, self.dtype = self._embed.device, self._embed.dtype
        self.layers = [Layer(config, weights, i) for i in range(config.layers)]
        self.rotary = Rotary(config, self.device, positions)
        self._norm = weights["norm"].float()
        self._head = Linear(weights["embed"] if config.tied else weights["head"])

    def embed(self, token_ids: Tensor) -> Tensor:
        return torch.nn.functional.embedding(token_ids, self._embed)

    def logits(self, x: Tensor) -> Tensor:
        """f32 `[rows, vocab]`."""
        return self._head(rms_norm(x, self._norm, self.config.rms_eps)).float()
