"""What can be set about the torch engine."""

from typing import Literal

import msgspec

from kvbus_wire.errors import ErrorCode
from kvbus_worker.engines.base import EngineError

Dtype = Literal["float32", "bfloat16"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}

TOKENIZER = "tokenizer.json"


class GrammarLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What guidance may cost.

    ``source_bytes``: schemas and grammars of one request. ``check_s``, ``check_bytes``: processor time and memory for trying one
    out. ``cache_entries``, ``cache_bytes``: compiled grammars kept, counted by their sources. ``waiting``: requests whose grammar
    is being compiled; more are refused.
    """

    source_bytes: int = 1 << 20
    check_s: int = 3
    check_bytes: int = 1 << 30
    cache_entries: int = 256
    cache_bytes: int = 16 << 20
    waiting: int = 256


class TorchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``model_dir``: a folder in the Hugging Face layout (config.json, safetensors).

    ``total_blocks`` 0: as many as fit into ``kv_cache_bytes``; that 0: 1 GiB on CPUs, 90% of the memory left after loading on GPUs.
    ``context_length`` 0: the model's; both are cut to what the cache can hold. ``max_num_seqs``, ``max_batched_tokens`` 0: see
    `limits`. ``max_waiting``: requests not yet begun, beyond
    which submit refuses. ``max_steps_ahead``: step outcomes not yet taken by the event loop, beyond which computing waits.
    ``threads``: CPU threads of the computation; several workers on one machine run best with 1 each.
    ``pin_share``: part of the blocks that the pins of one tenant may take.
    """

    model_dir: str
    device: str = "cpu"
    dtype: Dtype = "float32"
    block_size: int = 16
    total_blocks: int = 0
    kv_cache_bytes: int = 0
    context_length: int = 0
    max_num_seqs: int = 0
    max_batched_tokens: int = 0
    max_waiting: int = 256
    max_logprobs: int = 20
    max_steps_ahead: int = 64
    threads: int = 1
    pin_share: float = 0.5
    grammars: GrammarLimits = GrammarLimits()

    @property
    def on_cpu(self) -> bool:
        return self.device.split(":")[0] == "cpu"

    def limits(self) -> tuple[int, int]:
        """Sequences that run at once and tokens per step. By default a step takes about a second on one CPU core."""
        seqs, tokens = (32, 256) if self.on_cpu else (128, 4096)
        tokens = self.max_batched_tokens or max(tokens, self.max_num_seqs)
        return self.max_num_seqs or min(seqs, tokens), tokens

    def check(self) -> None:
        """Raise EngineError for values that cannot work."""
        for name in ("block_size", "max_waiting", "max_steps_ahead", "threads"):
            if getattr(self, name) < 1:
                raise EngineError(ErrorCode.INVALID_REQUEST, f"{name} must be at least 1", param=name)
        for name in (
            "total_blocks",
            "kv_cache_bytes",
            "context_length",
            "max_num_seqs",
            "max_batched_tokens",
            "max_logprobs",
        ):
            if getattr(self, name) < 0:
                raise EngineError(ErrorCode.INVALID_REQUEST, f"{name} must not be negative", param=name)
        seqs, tokens = self.limits()
        if tokens < seqs:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"max_batched_tokens {tokens} is below max_num_seqs {seqs}: some sequences could never decode",
                param="max_batched_tokens",
            )
