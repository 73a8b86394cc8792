"""The forward pass of a Llama-family transformer over one step: tokens of many sequences, flattened.

All linear layers see the step's tokens as one matrix; only attention looks at sequences one by one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from kvbus_worker.engines.torch.attention import AttentionPlan, CausalMask, Segment
from kvbus_worker.engines.torch.config import ModelConfig, Rope
from kvbus_worker.engines.torch.kv_cache import KvCache
from kvbus_worker.engines.torch.weights import Layer, Weights


@dataclass(frozen=True, slots=True)
class StepInput:
    """Row i is token ``tokens[i]`` at ``positions[i]``, whose KV goes to ``slots[i]``; ``sampled`` rows get logits."""

    tokens: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int]
    segments: Sequence[Segment]
    sampled: Sequence[int]


class Transformer:
    """``padded_decode``: see AttentionPlan; by default on everything but CPUs."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        cache: KvCache,
        context_length: int,
        *,
        padded_decode: bool | None = None,
    ) -> None:
        self._config = config
        self._weights = weights
        self._cache = cache
        self._device = weights.embedding.device
        self._padded = self._device.type != "cpu" if padded_decode is None else padded_decode
        self._causal = CausalMask(self._device, weights.embedding.dtype)
        self._cos, self._sin = _rotations(config, context_length, self._device)

    @torch.inference_mode()
    def forward(self, step: StepInput) -> Tensor:
        """Compute the step's KV into the cache. Gives float32 logits [sampled row][vocabulary]."""
        device, config = self._device, self._config
        tokens = torch.tensor(step.tokens, device=device)
        positions = torch.tensor(step.positions, device=device)
        slots = torch.tensor(step.slots, device=device)
        x = F.embedding(tokens, self._weights.embedding)
        cos, sin = self._cos[positions], self._sin[positions]
        groups = config.heads // config.kv_heads
        plan = AttentionPlan(step.segments, self._cache.block_size, groups, self._causal, x, padded=self._padded)
        for index, layer in enumerate(self._weights.layers):
            attended = self._attention(layer, index, _norm(x, layer.input_norm, config.norm_eps), plan, slots, cos, sin)
            x = x + F.linear(attended, layer.output, layer.output_bias)
            gate_up = F.linear(_norm(x, layer.post_norm, config.norm_eps), layer.gate_up, layer.gate_up_bias)
            gate, up = gate_up.chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
        last = x[torch.tensor(step.sampled, device=device, dtype=torch.long)]
        return F.linear(_norm(last, self._weights.norm, config.norm_eps), self._weights.head).float()

    def _attention(
        self, layer: Layer, index: int, x: Tensor, plan: AttentionPlan, slots: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        config = self._config
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(x.shape[0], -1, config.head_dim)
        query, key, value = torch.split(qkv, [config.heads, config.kv_heads, config.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query = _norm(query, layer.q_norm, config.norm_eps)
            key = _norm(key, layer.k_norm, config.norm_eps)
        keys, values = self._cache.layer(index)
        keys.index_copy_(0, slots, _rotate(key, cos, sin))
        values.index_copy_(0, slots, value)
        return plan.attend(_rotate(query, cos, sin), keys, values)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension, computed in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [row][head][dim], its two halves being the real and imaginary parts."""
    half = x.shape[-1] // 2
    real, imaginary = x[..., :half], x[..., half:]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), dim=-1)


def _rotations(config: ModelConfig, context_length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine as [position][1][dim / 2], float32."""
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    angles = torch.outer(torch.arange(context_length, dtype=torch.float32), frequencies)
    return angles.cos()[:, None, :].to(device), angles.sin()[:, None, :].to(device)


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[dim / 2], float32. The llama3 formula: https://github.com/meta-llama/llama-models, apply_scaling in model.py."""
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind != "llama3":
        return frequencies
    wave_lengths = 2 * math.pi / frequencies
    low_wave_length = rope.original_context / rope.low_freq_factor
    high_wave_length = rope.original_context / rope.high_freq_factor
    smooth = (rope.original_context / wave_lengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wave_lengths > low_wave_length, frequencies / rope.factor, between)
    return torch.where(wave_lengths < high_wave_length, frequencies, scaled)
