"""config.json and generation_config.json of a model folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvbus_wire.errors import ErrorCode
from kvbus_worker.engines.base import EngineError

SUPPORTED = ("llama", "qwen2", "qwen3")


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding. ``llama3`` stretches low frequencies only, between the two wave-length factors."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder-only transformer of the Llama family."""

    arch: str
    vocab_size: int
    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    context_length: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]


def read(folder: Path) -> ModelConfig:
    """Raise EngineError when the folder holds no model this engine can run."""
    raw = read_json(folder / "config.json")
    arch = raw.get("model_type")
    if arch not in SUPPORTED:
        raise _unsupported(f"model_type {arch!r}; supported are {', '.join(SUPPORTED)}")
    _refuse_what_would_compute_wrongly(raw)
    try:
        return _config(arch, raw, folder)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(ErrorCode.UNSUPPORTED, f"{folder / 'config.json'}: {error!r}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Raise EngineError when there is no such file or no JSON object in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(ErrorCode.UNAVAILABLE, f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise EngineError(ErrorCode.UNAVAILABLE, f"{path} holds no JSON object")
    return content


def _config(arch: str, raw: Mapping[str, Any], folder: Path) -> ModelConfig:
    hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} key-value heads")
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        arch=arch,
        vocab_size=int(raw["vocab_size"]),
        hidden=hidden,
        feed_forward=int(raw["intermediate_size"]),
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=int(raw.get("head_dim") or (128 if arch == "qwen3" else hidden // heads)),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw),
        context_length=int(raw["max_position_embeddings"]),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=arch == "qwen2" or attention_bias,
        output_bias=arch != "qwen2" and attention_bias,
        mlp_bias=arch == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=arch == "qwen3",
        eos_token_ids=_eos_token_ids(raw, folder),
    )


def _rope(raw: Mapping[str, Any]) -> Rope:
    """``rope_parameters`` (newer) holds what ``rope_theta`` and ``rope_scaling`` (older) say."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=float(scaling["factor"]))
    if kind == "llama3":
        return Rope(
            theta=theta,
            kind="llama3",
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_context=int(scaling["original_max_position_embeddings"]),
        )
    raise ValueError(f"rope scaling {kind!r} is not supported (default, linear, llama3 are)")


def _refuse_what_would_compute_wrongly(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise _unsupported(f"hidden_act {raw['hidden_act']!r}")
    if raw.get("quantization_config"):
        raise _unsupported("quantised weights")
    if raw.get("use_sliding_window"):
        raise _unsupported("sliding window attention")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported("partial rotary embeddings")


def _unsupported(what: str) -> EngineError:
    return EngineError(ErrorCode.UNSUPPORTED, f"the torch engine cannot run this model: {what}")


def _eos_token_ids(raw: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """The generation config decides; the model config is asked where it says nothing."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    ids = generation.get("eos_token_id")
    if ids is None:
        ids = raw.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(int(i) for i in ids) if isinstance(ids, list) else (int(ids),)
