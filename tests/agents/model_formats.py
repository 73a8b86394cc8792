"""Two model formats: how a model of each family would write a turn, thoughts and tool markup included.

Both models have a token per byte, so that token counts are the characters in which prefix reuse is told elsewhere, and the mock
engine can say anything.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvbus_cli.bench import agent_model
from kvbus_tokenizers import byte_level_bundle

CONTEXT_LENGTH = 400_000
_TEMPLATES = Path(__file__).parents[1] / "property" / "frontend" / "templates"


class Call(NamedTuple):
    """A tool call that the model makes."""

    name: str
    arguments: dict[str, Any]


class ModelFormat(Protocol):
    """``tool_parser``, ``reasoning_parser``: what `kvbus up` is told."""

    name: str
    tool_parser: str
    reasoning_parser: str

    def write_model(self, folder: Path, context_length: int) -> Path:
        """A model folder for the mock engine."""

    def turn(self, text: str = "", *, thought: str = "", calls: Sequence[Call] = ()) -> str:
        """Raw output: the thought, the text, the calls."""


class Xml:
    """Calls of qwen3_coder, thoughts of qwen3; the prompt has opened the thought."""

    name = "xml"
    tool_parser = "qwen3_coder"
    reasoning_parser = "qwen3"

    def write_model(self, folder: Path, context_length: int) -> Path:
        template = (_TEMPLATES / "qwen35.jinja").read_text(encoding="utf-8")
        bundle = byte_level_bundle(context_length=context_length, chat_template=template)
        folder.mkdir()
        for name, content in bundle.files.items():
            (folder / name).write_bytes(content)
        return folder

    def turn(self, text: str = "", *, thought: str = "", calls: Sequence[Call] = ()) -> str:
        said = f"{thought}\n</think>\n\n{text}"
        for index, call in enumerate(calls):
            said += ("\n\n" if text else "") if index == 0 else "\n"
            parameters = "".join(
                f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
                for key, value in call.arguments.items()
            )
            said += f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"
        return said


class Hermes:
    """Calls of hermes, thoughts of nemotron; the model opens its thought itself."""

    name = "hermes"
    tool_parser = "hermes"
    reasoning_parser = "nemotron_deci"

    def write_model(self, folder: Path, context_length: int) -> Path:
        return agent_model.write(folder, None, context_length)

    def turn(self, text: str = "", *, thought: str = "", calls: Sequence[Call] = ()) -> str:
        said = (f"<think>\n{thought}\n</think>\n\n" if thought else "") + text
        for call in calls:
            body = json.dumps({"name": call.name, "arguments": call.arguments})
            said += f"\n<tool_call>\n{body}\n</tool_call>"
        return said


FORMATS: dict[str, ModelFormat] = {model_format.name: model_format for model_format in (Xml(), Hermes())}
