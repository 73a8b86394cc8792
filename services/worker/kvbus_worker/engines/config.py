"""What an engine is made from. Third parties offer ``(EngineConfig) -> Engine`` as an entry point of group ``kvbus.engines``."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from kvbus_tokenizers import ModelBundle
from kvbus_worker.engines.base import Engine

ENTRY_POINT_GROUP = "kvbus.engines"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Zero (or an empty text) leaves a choice to the engine. ``options``: all settings of the worker by name, secrets excluded."""

    model_dir: Path | None
    bundle: ModelBundle
    eos_token_ids: tuple[int, ...]
    context_length: int
    device: str
    dtype: str
    block_size: int
    kv_blocks: int
    kv_bytes: int
    max_num_seqs: int
    max_batched_tokens: int
    max_waiting: int
    threads: int
    options: dict[str, object]


EngineFactory = Callable[[EngineConfig], Engine]
