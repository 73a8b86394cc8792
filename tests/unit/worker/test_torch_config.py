"""Reading a model folder's configuration."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvbus_wire.errors import ErrorCode
from kvbus_worker.engines.base import EngineError
from kvbus_worker.engines.torch.config import Rope, read
from kvbus_worker.engines.torch.settings import TorchSettings
from kvbus_worker.engines.torch.sizing import count_blocks, describe
from kvbus_worker.models import tiny


def write(folder: Path, generation: dict[str, Any] | None = None, **config: Any) -> Path:
    tiny.write(folder, **config)
    path = folder / "generation_config.json"
    path.unlink()
    if generation is not None:
        path.write_text(json.dumps(generation))
    return folder


def test_the_generation_config_decides_what_ends_an_answer(tmp_path: Path) -> None:
    assert read(write(tmp_path, {"eos_token_id": [7, 8]}, eos_token_id=5)).eos_token_ids == (7, 8)
    assert read(write(tmp_path, {"eos_token_id": 9}, eos_token_id=5)).eos_token_ids == (9,)
    assert read(write(tmp_path, {}, eos_token_id=[5, 6])).eos_token_ids == (5, 6)
    assert read(write(tmp_path, None, eos_token_id=5)).eos_token_ids == (5,)
    assert read(write(tmp_path, None, eos_token_id=None)).eos_token_ids == ()


def test_rope_is_read_in_its_old_and_its_new_form(tmp_path: Path) -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = Rope(theta=5e5, kind="llama3", factor=8.0, original_context=8192)
    assert read(write(tmp_path, rope_theta=5e5, rope_scaling=llama3)).rope == expected
    assert read(write(tmp_path, rope_parameters={**llama3, "rope_theta": 5e5})).rope == expected
    assert read(write(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})).rope.kind == "linear"
    assert read(write(tmp_path, rope_scaling=None)).rope == Rope(theta=10000.0)


def test_each_architecture_has_its_biases_and_norms(tmp_path: Path) -> None:
    qwen2 = read(write(tmp_path / "qwen2", arch="qwen2"))
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = read(write(tmp_path / "qwen3", arch="qwen3"))
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 32)
    llama = read(write(tmp_path / "llama", attention_bias=True, mlp_bias=True))
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias, llama.qk_norm) == (True, True, True, False)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mamba"},
        {"hidden_act": "gelu"},
        {"quantization_config": {"quant_method": "awq"}},
        {"use_sliding_window": True},
        {"partial_rotary_factor": 0.5},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"num_key_value_heads": 3},
    ],
    ids=str,
)
def test_what_would_be_computed_wrongly_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(EngineError) as refused:
        read(write(tmp_path, **config))
    assert refused.value.reply.code is ErrorCode.UNSUPPORTED


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError):
        read(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(EngineError):
        read(tmp_path)


def test_the_cache_is_sized_by_blocks_or_bytes_and_bounds_the_context(tmp_path: Path) -> None:
    config = read(write(tmp_path, context_length=2048))
    settings = TorchSettings(model_dir=str(tmp_path), total_blocks=10)
    assert describe(settings, config, count_blocks(settings, config)).context_length == 160
    info = describe(settings, config, 1000)
    assert (info.context_length, info.max_num_seqs, info.max_batched_tokens) == (2048, 32, 256)
    assert info.block_bytes == 3 * 2 * 16 * 2 * 16 * 4
    by_bytes = TorchSettings(model_dir=str(tmp_path), kv_cache_bytes=10 * info.block_bytes + 5)
    assert count_blocks(by_bytes, config) == 10
    on_gpu = TorchSettings(model_dir=str(tmp_path), device="cuda:0", dtype="bfloat16")
    assert count_blocks(on_gpu, config) == 0
    assert count_blocks(on_gpu, config, free_bytes=100 * info.block_bytes) == 180
    assert describe(on_gpu, config, 0).max_batched_tokens == 4096


@pytest.mark.parametrize(
    "wrong", [{"block_size": 0}, {"total_blocks": -1}, {"max_num_seqs": 8, "max_batched_tokens": 4}, {"threads": 0}]
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(EngineError):
        TorchSettings(model_dir=".", **wrong).check()


def test_layouts_differ_where_blocks_cannot_be_exchanged(tmp_path: Path) -> None:
    config = read(write(tmp_path))
    settings = [
        TorchSettings(model_dir="."),
        TorchSettings(model_dir=".", dtype="bfloat16"),
        TorchSettings(model_dir=".", block_size=32),
    ]
    layouts = {describe(each, config, 4).kv_layout for each in settings}
    layouts.add(describe(settings[0], read(write(tmp_path, num_hidden_layers=2)), 4).kv_layout)
    assert len(layouts) == 4
