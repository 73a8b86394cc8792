"""A client of the Messages API that measures the time to the first token. Blocking, standard library only."""

import http.client
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec

TIMEOUT_S = 60.0


class AnswerFailed(Exception):
    """The server refused the request or broke the answer off."""


class Answer(msgspec.Struct):
    """``content``: its blocks, as they go into the next request; ``first_token_s``: from the request to the first delta."""

    content: list[dict[str, Any]]
    first_token_s: float = 0.0
    input_tokens: int = 0
    cached_tokens: int = 0


class Client:
    """Asks one server, one request after the other. Blocking."""

    def __init__(self, url: str, model: str) -> None:
        self._address = urlsplit(url)
        self._model = model

    def count(self, request: dict[str, Any]) -> int:
        """Tokens of the prompt. Raise AnswerFailed."""
        body = msgspec.json.encode({"model": self._model, **request})
        with self._posted("/v1/messages/count_tokens", body) as (response, _):
            return int(msgspec.json.decode(response.read())["input_tokens"])

    def ask(self, request: dict[str, Any], output: str | None, *, max_tokens: int = 4096, **extension: Any) -> Answer:
        """``output``: what the engine says, in one step (None: what it likes); ``extension``: more under the key kvbus. Raise
        AnswerFailed."""
        if output is not None:
            extension["mock"] = {"chunks": [output], "finish": "stop_sequence"}  # no step for a token that ends it
        options = {"model": self._model, "stream": True, "max_tokens": max_tokens, "kvbus": extension}
        with self._posted("/v1/messages", msgspec.json.encode({**request, **options})) as (response, started):
            return _read(response, started)

    @contextmanager
    def _posted(self, path: str, body: bytes) -> Iterator[tuple[http.client.HTTPResponse, float]]:
        """The response, and when the request began."""
        connection = http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=TIMEOUT_S)
        try:
            connection.connect()
            started = time.perf_counter()
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise AnswerFailed(f"{path}: status {response.status}: {response.read(2000).decode(errors='replace')}")
            yield response, started
        except (OSError, http.client.HTTPException) as error:
            raise AnswerFailed(f"{path}: the connection broke: {error}") from error
        finally:
            connection.close()


def _read(response: http.client.HTTPResponse, started: float) -> Answer:
    answer = Answer([])
    arguments: dict[int, str] = {}
    for event in _events(response):
        match event["type"]:
            case "content_block_start":
                answer.content.append(event["content_block"])
            case "content_block_delta":
                answer.first_token_s = answer.first_token_s or time.perf_counter() - started
                _add(answer.content[event["index"]], event["delta"], arguments, event["index"])
            case "content_block_stop" if event["index"] in arguments:
                answer.content[event["index"]]["input"] = msgspec.json.decode(arguments[event["index"]])
            case "message_delta":
                usage = event["usage"]
                answer.cached_tokens = usage["cache_read_input_tokens"]
                answer.input_tokens = (
                    usage["input_tokens"] + usage["cache_creation_input_tokens"] + answer.cached_tokens
                )
            case "error":
                raise AnswerFailed(event["error"]["message"])
    if not answer.input_tokens:
        raise AnswerFailed("the answer ended early")
    return answer


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: "):
            yield msgspec.json.decode(line[len(b"data: ") :])


def _add(block: dict[str, Any], delta: dict[str, Any], arguments: dict[int, str], index: int) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case "input_json_delta":
            arguments[index] = arguments.get(index, "") + delta["partial_json"]
