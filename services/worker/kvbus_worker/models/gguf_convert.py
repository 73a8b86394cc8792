"""GGUF (llama architecture, GPT-2 style vocabulary) -> a model folder in the Hugging Face layout.

GGUF stores Q and K with the rows of each head interleaved for its rotary embedding (rows 0, d/2, 1, d/2+1, ..); Hugging Face's
layout has the two halves one after the other, so those two weights are un-permuted. Quantised weights are dequantised.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from kvbus_worker.models import tensor_files, tokenizer_files
from kvbus_worker.models.dtypes import StoredDtype
from kvbus_worker.models.errors import WrongContent
from kvbus_worker.models.progress import Progress

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_CONTROL_TOKEN = 3
_SPLITS_DIGITS = {"smollm": True, "gpt-2": False, "default": False}


class _Fields:
    """Typed access to the metadata of one file."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self._path = path
        self._reader = reader
        self._contents: dict[str, Any] = {}  # decoding the vocabulary takes seconds: once is enough

    def get(self, name: str) -> Any:
        if name not in self._contents:
            field = self._reader.fields.get(name)
            self._contents[name] = None if field is None else field.contents()
        return self._contents[name]

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise WrongContent(str(self._path), f"the metadata field {name} is missing")
        return value


def convert(
    source: Path, folder: Path, dtype: StoredDtype, progress: Progress, sampling: Mapping[str, Any] | None = None
) -> None:
    """Write config, weights, tokenizer and chat template into ``folder``, which exists. Raise WrongContent.

    ``sampling``: what generation_config.json shall recommend, which a GGUF file does not hold.
    """
    progress("read", 0, 2)
    reader = GGUFReader(source)
    fields = _Fields(source, reader)
    if fields.need("general.architecture") != "llama":
        raise WrongContent(str(source), f"the architecture {fields.get('general.architecture')!r} is not supported")
    progress("read", 1, 2)
    names = {tensor.name for tensor in reader.tensors}
    tokenizer_files.write_json(folder / "config.json", _config(fields, dtype, tied="output.weight" not in names))
    eos = fields.need("tokenizer.ggml.eos_token_id")
    generation = {"bos_token_id": fields.get("tokenizer.ggml.bos_token_id"), "eos_token_id": [eos], **(sampling or {})}
    tokenizer_files.write_json(folder / "generation_config.json", generation)
    _write_tokenizer(source, folder, fields)
    progress("read", 2, 2)
    tensor_files.write(folder / "model.safetensors", _tensors(reader, fields, progress), dtype)


def _config(fields: _Fields, dtype: StoredDtype, *, tied: bool) -> dict[str, Any]:
    heads, hidden = fields.need("llama.attention.head_count"), fields.need("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields.need("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": fields.need("llama.feed_forward_length"),
        "num_hidden_layers": fields.need("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv") or heads,
        "head_dim": fields.get("llama.attention.key_length") or hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields.need("llama.context_length"),
        # the file holds a float32: 1e-05 comes back as 9.999999747e-06
        "rms_norm_eps": float(f"{fields.need('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(fields.get("llama.rope.freq_base") or 10000.0),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.need("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }


def _unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tensors(reader: GGUFReader, fields: _Fields, progress: Progress) -> Iterator[tuple[str, NDArray[np.float32]]]:
    heads = fields.need("llama.attention.head_count")
    kv_heads = fields.get("llama.attention.head_count_kv") or heads
    for done, tensor in enumerate(reader.tensors, start=1):
        weight: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in _TOP:
            name = _TOP[tensor.name]
        else:
            _, layer, kind, suffix = tensor.name.split(".")
            name = f"model.layers.{layer}.{_LAYER[kind]}.{suffix}"
            if kind in {"attn_q", "attn_k"}:
                weight = _unpermute(weight, heads if kind == "attn_q" else kv_heads)
        yield name, weight
        progress("convert", done, len(reader.tensors))


def _write_tokenizer(source: Path, folder: Path, fields: _Fields) -> None:
    flavour = fields.get("tokenizer.ggml.pre") or "default"
    if fields.need("tokenizer.ggml.model") != "gpt2" or flavour not in _SPLITS_DIGITS:
        raise WrongContent(
            str(source), f"the tokenizer {fields.get('tokenizer.ggml.model')}/{flavour} is not supported"
        )
    tokens: list[str] = fields.need("tokenizer.ggml.tokens")
    merges = [
        (left, right) for left, _, right in (merge.partition(" ") for merge in fields.need("tokenizer.ggml.merges"))
    ]
    kinds = fields.need("tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    vocabulary = {token: index for index, token in enumerate(tokens)}

    def token_of(role: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{role}_token_id")
        return None if index is None else tokens[index]

    eos = tokens[fields.need("tokenizer.ggml.eos_token_id")]
    tokenizer_files.write(
        folder,
        tokenizer_files.byte_level_bpe(vocabulary, merges, special, split_digits=_SPLITS_DIGITS[flavour]),
        context_length=fields.need("llama.context_length"),
        chat_template=fields.need("tokenizer.chat_template"),
        bos=token_of("bos"),
        eos=eos,
        pad=token_of("padding") or eos,
        unknown=token_of("unknown"),
    )
