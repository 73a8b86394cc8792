"""A model folder for benchmarks of agents: a real tokenizer, a template that keeps thoughts, room for long prompts, no weights."""

from pathlib import Path

import msgspec

from kvbus_tokenizers import ModelBundle, byte_level_bundle
from kvbus_tokenizers.bundle import CHAT_TEMPLATE, CONFIG

CONTEXT_LENGTH = 131_072
TOOL_CALL_PARSER, REASONING_PARSER = "hermes", "qwen3"
"""The formats that the template writes, so that the next prompt begins with this one and what the model has written."""

_TEMPLATE = """\
{{- '<|im_start|>system\n' }}
{%- for message in messages if message.role == 'system' %}
{{- message.content + '\n\n' }}
{%- endfor %}
{{- '# Tools\n' }}
{%- for tool in tools or [] %}
{{- tool | tojson + '\n' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content %}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


def write(folder: Path, tokenizer_from: Path | None, context_length: int = CONTEXT_LENGTH) -> Path:
    """``tokenizer_from``: the folder of a model; None: one token per byte. Raise BundleInvalid."""
    bundle = byte_level_bundle() if tokenizer_from is None else ModelBundle.from_directory(tokenizer_from)
    config = msgspec.json.decode(bundle.files.get(CONFIG, b"{}"))
    config["max_position_embeddings"] = context_length
    files = {**bundle.files, CHAT_TEMPLATE: _TEMPLATE.encode(), CONFIG: msgspec.json.encode(config)}
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder
