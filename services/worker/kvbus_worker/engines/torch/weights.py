"""Weights of a model folder: safetensors, one file or several with an index, into the layout the model computes with."""

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvbus_wire.errors import ErrorCode
from kvbus_worker.engines.base import EngineError
from kvbus_worker.engines.torch.config import ModelConfig, read_json


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer block. Q, K and V are one matrix, gate and up are one: fewer and larger products."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor


def load(folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Weights:
    """Raise EngineError for missing files, missing tensors and wrong shapes."""
    try:
        with _Files(folder, device, dtype) as files:
            return _load(files, config)
    except (OSError, SafetensorError, KeyError) as error:
        raise EngineError(ErrorCode.UNAVAILABLE, f"cannot read the weights in {folder}: {error}") from error


class _Files:
    """All safetensors files of one model, opened."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self._folder = folder
        self._device = device
        self._dtype = dtype
        self._open: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}

    def __enter__(self) -> "_Files":
        index = self._folder / "model.safetensors.index.json"
        if index.exists():
            self._file_of = read_json(index)["weight_map"]
        else:
            self._file_of = dict.fromkeys(self._file("model.safetensors").keys(), "model.safetensors")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(str(self._folder / name), framework="pt").__enter__()  # type: ignore[no-untyped-call]
        return self._open[name]

    def get(self, *names: str, shape: tuple[int, ...]) -> Tensor:
        """The tensors one below the other, as one of ``shape``."""
        parts = []
        for name in names:
            if name not in self._file_of:
                raise KeyError(f"the tensor {name} is missing")
            parts.append(self._file(self._file_of[name]).get_tensor(name))
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        if tuple(tensor.shape) != shape:
            raise EngineError(
                ErrorCode.UNAVAILABLE, f"{' + '.join(names)} is {tuple(tensor.shape)}, the config says {shape}"
            )
        # a tensor that needs no conversion would stay a view of the mapped file
        return tensor.to(self._device, self._dtype, copy=True).contiguous()


def _load(files: _Files, config: ModelConfig) -> Weights:
    embedding = files.get("model.embed_tokens.weight", shape=(config.vocab_size, config.hidden))
    return Weights(
        embedding=embedding,
        layers=tuple(_load_layer(files, config, f"model.layers.{i}.") for i in range(config.layers)),
        norm=files.get("model.norm.weight", shape=(config.hidden,)),
        head=embedding if config.tied else files.get("lm_head.weight", shape=tuple(embedding.shape)),
    )


def _load_layer(files: _Files, config: ModelConfig, prefix: str) -> Layer:
    hidden, feed_forward = config.hidden, config.feed_forward
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def get(*names: str, shape: tuple[int, ...], wanted: bool = True) -> Tensor | None:
        return files.get(*(prefix + name for name in names), shape=shape) if wanted else None

    def need(*names: str, shape: tuple[int, ...]) -> Tensor:
        return files.get(*(prefix + name for name in names), shape=shape)

    qkv = [f"self_attn.{part}_proj" for part in "qkv"]
    gate_up = ["mlp.gate_proj", "mlp.up_proj"]
    return Layer(
        input_norm=need("input_layernorm.weight", shape=(hidden,)),
        qkv=need(*(f"{name}.weight" for name in qkv), shape=(query + 2 * key, hidden)),
        qkv_bias=get(*(f"{name}.bias" for name in qkv), shape=(query + 2 * key,), wanted=config.qkv_bias),
        q_norm=get("self_attn.q_norm.weight", shape=(config.head_dim,), wanted=config.qk_norm),
        k_norm=get("self_attn.k_norm.weight", shape=(config.head_dim,), wanted=config.qk_norm),
        output=need("self_attn.o_proj.weight", shape=(hidden, query)),
        output_bias=get("self_attn.o_proj.bias", shape=(hidden,), wanted=config.output_bias),
        post_norm=need("post_attention_layernorm.weight", shape=(hidden,)),
        gate_up=need(*(f"{name}.weight" for name in gate_up), shape=(2 * feed_forward, hidden)),
        gate_up_bias=get(*(f"{name}.bias" for name in gate_up), shape=(2 * feed_forward,), wanted=config.mlp_bias),
        down=need("mlp.down_proj.weight", shape=(hidden, feed_forward)),
        down_bias=get("mlp.down_proj.bias", shape=(hidden,), wanted=config.mlp_bias),
    )
