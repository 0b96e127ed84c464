"""Devices, models, and decode's time on a pool of devices, by roofline: the papers' hardware and prices.

A step reads all weights once and multiplies every row by them (`model_ns`), and attention reads the KVCache of every
sequence once (`attention_ns`). Both may run on the same devices, or attention on others, to which each layer sends its
queries, keys and values, and from which it hears the outputs.

Source: Lamina (arXiv 2405.01814 v2), sections 2 and 4 for the formulas, table 1 for devices and prices, section 6 for
the network.
"""

from __future__ import annotations

import msgspec

from halfmoon.conductor.simulation.profiles import ALL_REDUCE_NS
from halfmoon.schemas.numbers import SECOND_NS

#: Shares of peak FLOP/s and of peak memory bandwidth that are reached, and of memory that weights and KVCache may take.
#: Assumed: the paper gives peaks only.
COMPUTE_SHARE, MEMORY_SHARE, ROOM_SHARE = 0.6, 0.8, 0.9
#: Between a model device and an attention device: the paper's own network stack, measured by its authors over 400 Gb/s.
NETWORK_BYTES_S, ROUND_TRIP_NS = 45.7e9, 33_000
#: bf16.
ELEMENT_BYTES = 2


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator: peaks by its data sheet, price in US dollars an hour as the paper has it."""

    name: str
    flops: float
    memory_bytes_s: float
    memory_bytes: float
    dollars_hour: float


DEVICES = {
    device.name: device
    for device in (
        Device(name="h100", flops=989e12, memory_bytes_s=3.35e12, memory_bytes=80e9, dollars_hour=11.06),
        Device(name="h20", flops=148e12, memory_bytes_s=4.0e12, memory_bytes=96e9, dollars_hour=4.63),
        Device(name="v6e", flops=918e12, memory_bytes_s=1.64e12, memory_bytes=32e9, dollars_hour=2.70),
    )
}


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model's sizes, in bf16."""

    name: str
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def weight_bytes(self) -> float:
        return self.parameters * ELEMENT_BYTES

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * ELEMENT_BYTES

    @property
    def key_value_share(self) -> float:
        """Part of the weights that make k and v, which attention to cached tokens need not wait for."""
        return self.layers * 2 * self.width * self.kv_heads * self.head_dim / self.parameters


MODELS = {
    model.name: model
    for model in (
        ServedModel(name="llama-33b", parameters=32.5e9, layers=60, heads=52, kv_heads=52),
        ServedModel(name="llama-65b", parameters=65.2e9, layers=80, heads=64, kv_heads=64),
        ServedModel(name="llama3-70b", parameters=70.55e9, layers=80, heads=64, kv_heads=8),
    )
}


class DeploymentImpossible(ValueError):
    """A deployment that cannot serve; the text says why."""


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """One model on `model_devices` devices that hold its weights, and `attention_devices` that hold the KVCache.

    With 0 attention devices the weights' devices hold both, as vLLM's do. `groups` batches run in turn, over
    `groups - 1` replicas of the weights, at least one.
    """

    model: ServedModel
    model_device: Device
    model_devices: int
    attention_device: Device
    attention_devices: int = 0
    groups: int = 1
    #: Each layer sends its queries before it makes k and v.
    query_first: bool = True

    @property
    def separate(self) -> bool:
        return self.attention_devices > 0

    @property
    def replicas(self) -> int:
        return max(1, self.groups - 1)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KVCache has room for. Raises DeploymentImpossible where the weights have none."""
        room = ROOM_SHARE * self.model_devices * self.model_device.memory_bytes - self.model.weight_bytes
        if room < 0:
            raise DeploymentImpossible(
                f"{self.model.name}: {self.model.weight_bytes / 1e9:.0f} GB of weights do not fit on "
                f"{self.model_devices} × {self.model_device.name}"
            )
        if self.separate:
            room = ROOM_SHARE * self.attention_devices * self.attention_device.memory_bytes
        return int(room // self.model.token_bytes)

    @property
    def dollars_hour(self) -> float:
        weights = self.replicas * self.model_devices * self.model_device.dollars_hour
        return weights + self.attention_devices * self.attention_device.dollars_hour

    def model_ns(self, batch: int) -> float:
        """A step of `batch` rows without attention, all layers."""
        device, model = self.model_device, self.model
        computed = 2 * model.parameters * batch / (device.flops * COMPUTE_SHARE)
        read_bytes = ELEMENT_BYTES * (model.parameters + 2 * batch * model.width)
        read = read_bytes / (device.memory_bytes_s * MEMORY_SHARE)
        reduces = 2 * model.layers * ALL_REDUCE_NS if self.model_devices > 1 else 0
        return max(computed, read) / self.model_devices * SECOND_NS + reduces

    def attention_ns(self, context_tokens: int) -> float:
        """Attention of a step to `context_tokens` of all its sequences together, all layers."""
        device = self.attention_device if self.separate else self.model_device
        devices = self.attention_devices or self.model_devices
        read_bytes = context_tokens * self.model.token_bytes
        return read_bytes / (devices * device.memory_bytes_s * MEMORY_SHARE) * SECOND_NS

    def sent_ns(self, batch: int, row_elements: int) -> float:
        """Time on the way of one layer's message of `batch` rows, one direction."""
        # Every device of the smaller pool has a link to the other pool.
        links = min(self.model_devices, self.attention_devices)
        moved = batch * row_elements * ELEMENT_BYTES / (links * NETWORK_BYTES_S) * SECOND_NS
        return ROUND_TRIP_NS / 2 + moved

    def step_bytes(self, batch: int) -> int:
        """Payload between the pools in a step of `batch` rows: (2 + 2/G)·e·d of each row and layer."""
        model = self.model
        row_elements = 2 * model.width + 2 * model.kv_heads * model.head_dim
        return row_elements * ELEMENT_BYTES * batch * model.layers


def degrees_of_parallelism(
    model: ServedModel,
    model_device: Device,
    attention_device: Device,
    *,
    batch: int,
    context_tokens: int,
    groups: int,
) -> Deployment:
    """The paper's DOP (a, b) for `groups` batches of `batch` sequences with a mean context of `context_tokens`.

    a: the fewest devices that hold the weights. b: the fewest that hold the KVCache and whose attention takes no
    longer than 1/(groups - 1) of the model's part, so that neither pool waits for the other.
    """
    weights = 1
    while ROOM_SHARE * weights * model_device.memory_bytes < model.weight_bytes:
        weights += 1
    one = Deployment(
        model=model,
        model_device=model_device,
        model_devices=weights,
        attention_device=attention_device,
        attention_devices=1,
        groups=groups,
    )
    tokens = batch * context_tokens
    by_time = one.attention_ns(tokens) * max(1, groups - 1) / one.model_ns(batch)
    by_room = groups * tokens / one.kv_tokens
    return msgspec.structs.replace(one, attention_devices=max(1, -int(-max(by_time, by_room) // 1)))
