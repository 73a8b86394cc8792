"""A request's body from a file, which API it belongs to, and its headers."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvbus_protocols.prompt_view import PromptApi

_RESPONSES = ("input", "instructions", "previous_response_id", "max_output_tokens")
_MESSAGES = ("system", "thinking", "output_config", "context_management", "stop_sequences")
_MESSAGES_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking", "document", "image", "search_result")


class BadRequestFile(Exception):
    """No file, or no request in it; the text is for the person at the terminal."""


class RequestFile(msgspec.Struct, frozen=True):
    """``name``: of the file; ``body``: as it is sent; ``fields``: the same, decoded."""

    name: str
    body: bytes
    fields: dict[str, Any]
    api: PromptApi


def read_request(name: str, api: PromptApi | None) -> RequestFile:
    """``name``: a path, or ``-`` for the standard input. Raise BadRequestFile."""
    try:
        body = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as problem:
        raise BadRequestFile(f"{name} cannot be read: {problem.strerror}") from problem
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise BadRequestFile(f"{name} is no JSON: {problem}") from problem
    if not isinstance(fields, dict):
        raise BadRequestFile(f"{name} is no request body: it is not a JSON object")
    return RequestFile(name, body, fields, api or api_of(fields))


def request_headers(given: Iterable[str], api_key: str) -> dict[str, str]:
    """``given``: as NAME:VALUE. Raise BadRequestFile."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    for line in given:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise BadRequestFile(f"--header takes NAME:VALUE, not {line!r}")
        headers[name.strip()] = value.strip()
    return headers


def api_of(fields: Mapping[str, Any]) -> PromptApi:
    """By what only one of the APIs has; a request that Chat Completions and Messages share is taken for the former."""
    if "messages" not in fields and any(name in fields for name in _RESPONSES):
        return "responses"
    if any(name in fields for name in _MESSAGES) or any(map(_is_messages_only, _objects(fields))):
        return "messages"
    return "chat"


def _objects(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The tools and the blocks of messages."""
    for name in ("tools", "messages"):
        given = fields.get(name)
        for item in given if isinstance(given, list) else ():
            if isinstance(item, dict):
                yield item
                content = item.get("content")
                yield from (block for block in content if isinstance(block, dict)) if isinstance(content, list) else ()


def _is_messages_only(value: Mapping[str, Any]) -> bool:
    return "input_schema" in value or "cache_control" in value or value.get("type") in _MESSAGES_BLOCKS
