"""What the worker reads of a model folder: the text side as a bundle, sizes, and the identity of the weights."""

import json
from hashlib import blake2b
from pathlib import Path

import msgspec

from kvbus_tokenizers import (
    BundleInvalid,
    ModelBundle,
    bundle_name,
    byte_level_bundle,
    pack_bundle,
    read_generation_config,
)
from kvbus_wire.errors import ErrorCode
from kvbus_worker.engines.base import EngineError

_SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 256 << 20
_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin")
_DEFAULT_CONTEXT_LENGTH = 32_768
_BUILTIN_CONTEXT_LENGTH = 131_072


class _TextConfig(msgspec.Struct, frozen=True):
    vocab_size: int = 0
    max_position_embeddings: int = 0


class _Config(msgspec.Struct, frozen=True):
    vocab_size: int = 0
    max_position_embeddings: int = 0
    text_config: _TextConfig = _TextConfig()


class ModelFolder(msgspec.Struct, frozen=True, kw_only=True):
    """``packed``: the bundle as it is published; ``vocab_size`` 0: unknown."""

    directory: Path | None
    bundle: ModelBundle
    packed: bytes
    bundle_name: str
    fingerprint: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]


def load_model_folder(directory: Path | None) -> ModelFolder:
    """Read files: call it in a thread. None is the built-in byte-level model without weights. Raise EngineError."""
    try:
        if directory is None:
            bundle = byte_level_bundle(context_length=_BUILTIN_CONTEXT_LENGTH)
        else:
            bundle = ModelBundle.from_directory(directory)
        config = msgspec.json.decode(bundle.files.get("config.json", b"{}"), type=_Config)
        eos_token_ids = read_generation_config(bundle).eos_token_ids
        packed = pack_bundle(bundle)
        fingerprint = weights_fingerprint(directory, bundle)
    except (BundleInvalid, OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"model folder {directory}: {error}", param="model") from error
    return ModelFolder(
        directory=directory,
        bundle=bundle,
        packed=packed,
        bundle_name=bundle_name(packed),
        fingerprint=fingerprint,
        vocab_size=config.vocab_size or config.text_config.vocab_size,
        context_length=config.max_position_embeddings
        or config.text_config.max_position_embeddings
        or _DEFAULT_CONTEXT_LENGTH,
        eos_token_ids=eos_token_ids,
    )


def weights_fingerprint(directory: Path | None, bundle: ModelBundle) -> str:
    """Identity of config, tokenizer and weights, equal on every machine that has the same files.

    Of the weights it takes each file's name, size and header, and samples of each tensor (its first and middle 4 KiB): any training
    changes those, and a model of 100 GB is identified in a second.
    """
    state = blake2b(digest_size=16, person=b"kvbus.model.v1")
    for name in ("config.json", "tokenizer.json"):
        content = bundle.files.get(name, b"")
        state.update(len(content).to_bytes(8, "little") + content)
    paths = sorted(p for p in directory.iterdir() if p.suffix in _WEIGHT_SUFFIXES) if directory is not None else []
    for path in paths:
        size = path.stat().st_size
        state.update(path.name.encode() + b"\0" + size.to_bytes(8, "little"))
        with path.open("rb") as file:
            header, offsets = b"", [size * part // 64 for part in range(64)]
            if path.suffix == ".safetensors":
                length = int.from_bytes(file.read(8), "little")
                if length > min(size, _MAX_HEADER_BYTES):
                    raise BundleInvalid(f"{path.name} is no safetensors file")
                header = file.read(length)
                offsets = _tensor_samples(header, 8 + length)
            state.update(header)
            for offset in offsets:
                file.seek(offset)
                state.update(file.read(_SAMPLE_BYTES))
    return state.hexdigest()


def _tensor_samples(header: bytes, data_start: int) -> list[int]:
    try:
        tensors = json.loads(header)
        ranges = sorted(tuple(entry["data_offsets"]) for name, entry in tensors.items() if name != "__metadata__")
        return [data_start + at for start, end in ranges for at in (start, (start + end) // 2)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleInvalid(f"a safetensors header cannot be read: {error}") from error
