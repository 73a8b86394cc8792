"""Models of all supported shapes, and a plain reference to compare with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbus_cli.paths import models_dir
from kvbus_worker.models import smollm2, tiny

pytest.importorskip("torch")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TINY: dict[str, dict[str, Any]] = {
    "llama": {"arch": "llama"},
    "llama-tied": {"arch": "llama", "tied": True},
    "llama3-rope": {"arch": "llama", "rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0},
    "linear-rope": {"arch": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama-bias": {"arch": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {"arch": "qwen2"},
    "qwen3": {"arch": "qwen3"},
    "qwen3-bias": {"arch": "qwen3", "attention_bias": True, "num_key_value_heads": 1},
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model by its name in TINY, or of the real one as ``smollm2`` (fetched once and kept)."""
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        if name == "smollm2":
            return smollm2.prepare(models_dir())
        path = root / name
        return path if path.exists() else tiny.write(path, **TINY[name])

    return folder
