"""How many blocks the cache has, and what the engine says about itself."""

from pathlib import Path

from kvbus_worker.engines.base import EngineInfo
from kvbus_worker.engines.torch.config import ModelConfig
from kvbus_worker.engines.torch.settings import DTYPE_BYTES, TOKENIZER, TorchSettings

_CPU_CACHE_BYTES = 1 << 30
_GPU_SHARE = 0.9  # of the memory that is free once the model is loaded


def kv_layout(config: ModelConfig, settings: TorchSettings) -> str:
    """Blocks with equal layouts have equal bytes for equal keys, whatever device they lie on. See KvCache for the order."""
    shape = f"l{config.layers}-h{config.kv_heads}-d{config.head_dim}-b{settings.block_size}"
    return f"lkthd1-{settings.dtype}-{shape}"


def block_bytes(config: ModelConfig, settings: TorchSettings) -> int:
    per_token = config.layers * 2 * config.kv_heads * config.head_dim * DTYPE_BYTES[settings.dtype]
    return per_token * settings.block_size


def count_blocks(settings: TorchSettings, config: ModelConfig, free_bytes: int | None = None) -> int:
    """``free_bytes``: what the device has left after loading. 0 when the number can only be told then."""
    if settings.total_blocks:
        return settings.total_blocks
    if settings.kv_cache_bytes:
        room = settings.kv_cache_bytes
    elif settings.on_cpu:
        room = _CPU_CACHE_BYTES
    elif free_bytes is not None:
        room = int(free_bytes * _GPU_SHARE)
    else:
        return 0
    return max(room // block_bytes(config, settings), 1)


def describe(
    settings: TorchSettings,
    config: ModelConfig,
    total_blocks: int,
    prefill_tokens_per_s: float = 0.0,
    decode_step_s: float = 0.0,
) -> EngineInfo:
    """One request alone must always fit, so the context is cut to the cache."""
    context_length = min(settings.context_length or config.context_length, config.context_length)
    if total_blocks:
        context_length = min(context_length, total_blocks * settings.block_size)
    max_num_seqs, max_batched_tokens = settings.limits()
    return EngineInfo(
        name="torch",
        block_size=settings.block_size,
        total_blocks=total_blocks,
        context_length=context_length,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        kv_layout=kv_layout(config, settings),
        block_bytes=block_bytes(config, settings),
        prefill_tokens_per_s=prefill_tokens_per_s,
        decode_step_s=decode_step_s,
        guidance=(Path(settings.model_dir) / TOKENIZER).is_file(),
    )
