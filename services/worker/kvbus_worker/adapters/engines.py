"""Making the engine that the settings name. Only a worker that runs the torch engine imports torch."""

from importlib.metadata import entry_points
from typing import Any, Literal

import msgspec

from kvbus_runtime.settings import effective
from kvbus_tokenizers import TokenizerError, load_tokenizer
from kvbus_wire.errors import ErrorCode
from kvbus_worker.adapters.model_folder import ModelFolder
from kvbus_worker.engines.base import Engine, EngineError
from kvbus_worker.engines.config import ENTRY_POINT_GROUP, EngineConfig
from kvbus_worker.settings import WorkerSettings

_MOCK_DEFAULT_BLOCKS = 65_536
_MOCK_DEFAULT_SEQS = 256
_MOCK_DEFAULT_BATCH = 8192
_MOCK_DEFAULT_WAITING = 1024


def create_engine(settings: WorkerSettings, model: ModelFolder) -> Engine:
    """Build, not start: reads files and may import much, so call it in a thread. Raise EngineError."""
    context_length = settings.context_length or model.context_length
    config = EngineConfig(
        model_dir=model.directory,
        bundle=model.bundle,
        eos_token_ids=model.eos_token_ids,
        context_length=context_length,
        device=settings.device,
        dtype=settings.dtype,
        block_size=settings.block_size,
        kv_blocks=settings.kv_blocks,
        kv_bytes=settings.kv_bytes,
        max_num_seqs=settings.max_num_seqs,
        max_batched_tokens=settings.max_batched_tokens,
        max_waiting=settings.max_waiting,
        threads=settings.threads,
        options=effective(settings),
    )
    if settings.engine == "mock":
        return _mock(settings, config)
    if settings.engine == "torch":
        return _torch(settings, config)
    found = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == settings.engine]
    if not found:
        known = sorted({"mock", "torch", *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})
        raise EngineError(
            ErrorCode.UNSUPPORTED, f"no engine {settings.engine}; there are {', '.join(known)}", param="engine"
        )
    factory: Any = found[0].load()
    engine: Engine = factory(config)
    return engine


def _torch(settings: WorkerSettings, config: EngineConfig) -> Engine:
    try:
        from kvbus_worker.engines.torch.engine import TorchEngine
        from kvbus_worker.engines.torch.settings import GrammarLimits, TorchSettings
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors", "numpy", "llguidance"):
            raise
        raise EngineError(
            ErrorCode.UNSUPPORTED,
            f"the torch engine needs {error.name}: install kvbus with the extra torch, or choose --engine mock",
            param="engine",
        ) from error

    if config.model_dir is None:
        raise EngineError(ErrorCode.INVALID_REQUEST, "the torch engine needs a model folder", param="model")
    on_cpu = config.device.startswith("cpu")
    # The engine's own defaults stand where nothing is set.
    chosen = {
        "total_blocks": config.kv_blocks,
        "kv_cache_bytes": config.kv_bytes,
        "max_num_seqs": config.max_num_seqs,
        "max_batched_tokens": config.max_batched_tokens,
        "max_waiting": config.max_waiting,
        "threads": config.threads,
    }
    base = TorchSettings(
        model_dir=str(config.model_dir),
        device=config.device,
        dtype=_torch_dtype(config.dtype, on_cpu=on_cpu),
        block_size=config.block_size,
        context_length=config.context_length,
        pin_share=settings.g1_pin_share,
        grammars=GrammarLimits(
            source_bytes=settings.max_grammar_bytes,
            check_s=settings.grammar_check_s,
            cache_entries=settings.grammar_cache_entries,
            cache_bytes=settings.grammar_cache_bytes,
            waiting=settings.max_grammars_waiting,
        ),
    )
    return TorchEngine(msgspec.structs.replace(base, **{name: value for name, value in chosen.items() if value}))


def _torch_dtype(name: str, *, on_cpu: bool) -> Literal["float32", "bfloat16"]:
    if name == "auto":
        return "float32" if on_cpu else "bfloat16"
    if name == "float32":
        return "float32"
    if name == "bfloat16":
        return "bfloat16"
    raise EngineError(ErrorCode.UNSUPPORTED, f"dtype {name}; there are auto, float32, bfloat16", param="dtype")


def _mock(settings: WorkerSettings, config: EngineConfig) -> Engine:
    from kvbus_worker.engines.mock import MockConfig, MockEngine, TimingModel, TokenizerVocabulary

    try:
        vocabulary = TokenizerVocabulary(load_tokenizer(config.bundle))
    except TokenizerError as error:
        raise EngineError(ErrorCode.UNSUPPORTED, f"the model's tokenizer: {error}", param="model") from error
    blocks = config.kv_blocks
    if not blocks and config.kv_bytes and settings.mock_block_bytes:
        blocks = max(config.kv_bytes // settings.mock_block_bytes, 1)
    timing = TimingModel(
        step_base_s=settings.mock_step_base_s,
        prefill_tokens_per_s=settings.mock_prefill_tokens_per_s,
        attention_s_per_pair=settings.mock_attention_s_per_pair,
        decode_s_per_seq=settings.mock_decode_s_per_seq,
        decode_s_per_context_token=settings.mock_decode_s_per_context_token,
        speedup=settings.mock_speedup,
    )
    return MockEngine(
        MockConfig(
            block_size=config.block_size,
            total_blocks=blocks or _MOCK_DEFAULT_BLOCKS,
            context_length=config.context_length,
            max_num_seqs=config.max_num_seqs or _MOCK_DEFAULT_SEQS,
            max_batched_tokens=config.max_batched_tokens or _MOCK_DEFAULT_BATCH,
            max_waiting=config.max_waiting or _MOCK_DEFAULT_WAITING,
            block_bytes=settings.mock_block_bytes,
            pin_share=settings.g1_pin_share,
            output_tokens=settings.mock_output_tokens,
            script=settings.script,
            eos_token_id=config.eos_token_ids[0] if config.eos_token_ids else None,
            timing=timing,
        ),
        vocabulary,
    )
