"""Weights as large models store them: in several files with an index."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from kvbus_worker.engines.base import EngineError  # noqa: E402
from kvbus_worker.engines.torch import config, weights  # noqa: E402
from kvbus_worker.models import tiny  # noqa: E402


def loaded(folder: Path) -> weights.Weights:
    return weights.load(folder, config.read(folder), torch.device("cpu"), torch.float32)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The tiny model with its tensors dealt out to three files."""
    folder = tiny.write(tmp_path / "sharded")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]
    weight_map = {tensor: names[i % 3] for i, tensor in enumerate(tensors)}
    for name in names:
        save_file({tensor: tensors[tensor] for tensor, file in weight_map.items() if file == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_several_files_are_read_like_one(sharded: Path, tmp_path: Path) -> None:
    whole, parts = loaded(tiny.write(tmp_path / "whole")), loaded(sharded)
    assert torch.equal(whole.embedding, parts.embedding)
    assert torch.equal(whole.head, parts.head)
    assert len(whole.layers) == len(parts.layers)
    for one, other in zip(whole.layers, parts.layers, strict=True):
        assert torch.equal(one.qkv, other.qkv)
        assert torch.equal(one.down, other.down)


def test_a_missing_file_and_an_index_without_a_map_are_told(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(EngineError, match="model-00002"):
        loaded(sharded)
    (sharded / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(EngineError, match="weight_map"):
        loaded(sharded)
