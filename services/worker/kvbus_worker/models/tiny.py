"""Tiny random models with a byte tokenizer: every shape of the supported architectures, ready in milliseconds."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvbus_worker.models import tensor_files, tokenizer_files

Architecture = Literal["llama", "qwen2", "qwen3"]

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCAB_SIZE = 256 + len(SPECIAL)

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _FEED_FORWARD = 64, 3, 4, 2, 128


def write(
    folder: Path,
    *,
    arch: Architecture = "llama",
    seed: int = 0,
    context_length: int = 2048,
    tied: bool = False,
    rope_scaling: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write a whole model folder (existing files are replaced) and return it.

    Equal arguments give equal bytes. ``config`` overrides or adds fields of config.json (say ``num_hidden_layers``). The weights
    are large enough that greedy output wanders instead of repeating one token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = _config(arch, context_length, tied, rope_scaling) | config
    tokenizer_files.write_json(folder / "config.json", settings)
    tokenizer_files.write_json(folder / "generation_config.json", {"eos_token_id": [2, 0], "pad_token_id": 0})
    tensor_files.write(folder / "model.safetensors", _tensors(arch, settings, seed).items(), "float32")
    _write_tokenizer(folder, context_length)
    return folder


def _config(arch: Architecture, context_length: int, tied: bool, rope_scaling: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "architectures": [_CLASSES[arch]],
        "model_type": arch,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _HIDDEN,
        "intermediate_size": _FEED_FORWARD,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": 32 if arch == "qwen3" else _HIDDEN // _HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _tensors(arch: Architecture, config: dict[str, Any], seed: int) -> dict[str, NDArray[np.float32]]:
    rng = np.random.Generator(np.random.PCG64(seed))

    def normal(*shape: int, scale: float) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    hidden, feed_forward, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (feed_forward, hidden),
        "mlp.up_proj": (feed_forward, hidden),
        "mlp.down_proj": (hidden, feed_forward),
    }
    biased = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"} if arch == "qwen2" else set()
    if config.get("attention_bias"):
        biased |= {name for name in shapes if name.startswith("self_attn")}
    if config.get("mlp_bias"):
        biased |= {name for name in shapes if name.startswith("mlp")}
    tensors = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, scale=1.0)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns) in shapes.items():
            tensors[f"{prefix}{name}.weight"] = normal(rows, columns, scale=2.0 * columns**-0.5)
            if name in biased:
                tensors[f"{prefix}{name}.bias"] = normal(rows, scale=0.5)
        norms = ["input_layernorm", "post_attention_layernorm"]
        for name in norms:
            tensors[f"{prefix}{name}.weight"] = 1.0 + normal(hidden, scale=0.2)
        if arch == "qwen3":
            for name in ("self_attn.q_norm", "self_attn.k_norm"):
                tensors[f"{prefix}{name}.weight"] = 1.0 + normal(head_dim, scale=0.2)
    tensors["model.norm.weight"] = 1.0 + normal(hidden, scale=0.2)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(config["vocab_size"], hidden, scale=hidden**-0.5 * 4.0)
    return tensors


def _write_tokenizer(folder: Path, context_length: int) -> None:
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *_byte_characters()))}
    tokenizer = tokenizer_files.byte_level_bpe(vocabulary, [], SPECIAL, split_digits=False)
    tokenizer_files.write(
        folder,
        tokenizer,
        context_length=context_length,
        chat_template=CHAT_TEMPLATE,
        bos="<|im_start|>",
        eos="<|im_end|>",
        pad="<|endoftext|>",
        unknown=None,
    )


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next free character from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
