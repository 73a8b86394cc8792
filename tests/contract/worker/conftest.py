"""The engines that must behave alike. Add one: a name and a function that builds it, not started, with the given limits."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from kvbus_worker.engines.base import Engine
from kvbus_worker.models import tiny

MakeEngine = Callable[..., Engine]


def _torch(folder: Path, arch: tiny.Architecture, **limits: float) -> Engine:
    pytest.importorskip("torch")
    from kvbus_worker.engines.torch.engine import TorchEngine
    from kvbus_worker.engines.torch.settings import TorchSettings

    if not folder.exists():
        tiny.write(folder, arch=arch)
    return TorchEngine(TorchSettings(model_dir=str(folder), **limits))  # type: ignore[arg-type]


def _mock(**limits: float) -> Engine:
    from kvbus_tokenizers import byte_level_bundle, load_tokenizer
    from kvbus_worker.engines.mock import MockConfig, MockEngine, TimingModel, TokenizerVocabulary

    vocabulary = TokenizerVocabulary(load_tokenizer(byte_level_bundle()))
    return MockEngine(MockConfig(timing=TimingModel(speedup=20.0), **limits), vocabulary)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(params=["torch-llama", "torch-qwen3", "mock"])
def make_engine(request: pytest.FixtureRequest, model_folders: Path) -> MakeEngine:
    name: str = request.param

    def make(**limits: float) -> Engine:
        small = {
            "block_size": 16,
            "total_blocks": 64,
            "context_length": 512,
            "max_num_seqs": 4,
            "max_batched_tokens": 64,
            "max_waiting": 64,
        } | limits
        if name == "mock":
            return _mock(**small)
        arch = cast("tiny.Architecture", name.removeprefix("torch-"))
        return _torch(model_folders / arch, arch, **small)

    return make
