"""One request of a client and what it was answered, read in the dialect it was made in."""

import gzip
import json
from typing import Any

import msgspec
import zstandard

_GENERATIONS = ("/v1/messages", "/v1/responses", "/v1/chat/completions")


class Usage(msgspec.Struct, frozen=True):
    """``prompt_tokens`` include the ``cached_tokens``."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Exchange(msgspec.Struct, kw_only=True):
    """``path`` without the query. ``response``: what went to the client so far, ``over`` once that is all of it.

    On a WebSocket each frame that asks for a response is an exchange of its own; ``frames`` are the frames it was answered by.
    """

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    status: int = 0
    response_headers: dict[str, str] = {}
    response: bytes = b""
    frames: list[str] | None = None
    over: bool = False
    disconnected: bool = False

    @property
    def is_generation(self) -> bool:
        return self.method in ("POST", "WS") and self.path in _GENERATIONS

    @property
    def json(self) -> dict[str, Any]:
        """The request's body."""
        encoding = self.headers.get("content-encoding", "")
        body = self.body
        if encoding == "zstd":
            body = zstandard.ZstdDecompressor().decompressobj().decompress(body)
        elif encoding == "gzip":
            body = gzip.decompress(body)
        found: dict[str, Any] = json.loads(body)
        return found

    @property
    def events(self) -> list[dict[str, Any]]:
        """What was streamed; a body that was not streamed counts as one event."""
        if self.frames is not None:
            return [json.loads(frame) for frame in self.frames]
        text = self.response.decode(errors="replace")
        if self.response_headers.get("content-type", "").startswith("text/event-stream"):
            whole = text.rpartition("\n\n")[0]  # the last event may be on its way
            data = [line.removeprefix("data: ") for line in whole.split("\n") if line.startswith("data: ")]
            return [json.loads(item) for item in data if item != "[DONE]"]
        try:
            body = json.loads(text)
        except ValueError:
            return []
        return [body] if isinstance(body, dict) else []

    @property
    def usage(self) -> Usage | None:
        """The last usage that the answer tells."""
        found: dict[str, Any] = {}
        for event in self.events:
            for place in (event, event.get("message"), event.get("response")):
                if isinstance(place, dict) and isinstance(place.get("usage"), dict):
                    found |= {key: value for key, value in place["usage"].items() if value is not None}
        if "prompt_tokens" in found:
            cached = (found.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            return Usage(found["prompt_tokens"], cached, found["completion_tokens"])
        if "input_tokens_details" in found:
            cached = found["input_tokens_details"].get("cached_tokens", 0)
            return Usage(found["input_tokens"], cached, found["output_tokens"])
        if "input_tokens" in found:
            cached = found.get("cache_read_input_tokens", 0)
            prompt = found["input_tokens"] + cached + found.get("cache_creation_input_tokens", 0)
            return Usage(prompt, cached, found["output_tokens"])
        return None

    @property
    def text(self) -> str:
        """The visible text of the answer, as far as it has come."""
        return "".join(_text(event) for event in self.events)

    @property
    def calls(self) -> list[str]:
        """Names of the tools that the answer calls."""
        names: list[str] = []
        for event in self.events:
            names += _messages_calls(event) + _responses_calls(event) + _chat_calls(event)
        return names

    def in_prompt(self, text: str) -> bool:
        """Whether the request holds this text, anywhere."""
        return json.dumps(text, ensure_ascii=False)[1:-1] in json.dumps(self.json, ensure_ascii=False)


def _text(event: dict[str, Any]) -> str:
    match event:
        case {"type": "content_block_delta", "delta": {"type": "text_delta", "text": str(text)}}:
            return text
        case {"type": "response.output_text.delta", "delta": str(text)}:
            return text
        case {"type": "message", "content": list(blocks)}:
            return "".join(block["text"] for block in blocks if block["type"] == "text")
        case {"object": "response", "output": list(items)}:
            parts = [part for item in items for part in item.get("content") or []]
            return "".join(part["text"] for part in parts if part["type"] == "output_text")
        case {"choices": list(choices)}:
            said = [choice.get("delta") or choice.get("message") or {} for choice in choices]
            return "".join(message.get("content") or "" for message in said)
    return ""


def _messages_calls(event: dict[str, Any]) -> list[str]:
    if event.get("type") == "content_block_start":
        blocks = [event["content_block"]]
    elif event.get("type") == "message":
        blocks = event["content"]
    else:
        blocks = []
    return [block["name"] for block in blocks if block["type"] == "tool_use"]


def _responses_calls(event: dict[str, Any]) -> list[str]:
    if event.get("type") == "response.output_item.done":
        items = [event["item"]]
    elif event.get("object") == "response":
        items = event["output"]
    else:
        items = []
    return [item.get("name", item["type"]) for item in items if item["type"].endswith("_call")]


def _chat_calls(event: dict[str, Any]) -> list[str]:
    names = []
    for choice in event.get("choices") or []:
        said = choice.get("delta") or choice.get("message") or {}
        for call in said.get("tool_calls") or []:
            name = (call.get("function") or call.get("custom") or {}).get("name")
            names += [name] if name else []
    return names
