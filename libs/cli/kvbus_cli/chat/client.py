"""One streamed turn over HTTP: what arrives, and how fast. Blocking, standard library only."""

import http.client
import time
from collections.abc import Generator, Iterable, Iterator

import msgspec

from kvbus_cli.server_address import ServerAddress


class ChatFailed(Exception):
    """The server refused the turn or broke it off; the text is for the person at the terminal."""


class Message(msgspec.Struct):
    role: str
    content: str


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _ModelId(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ModelId]


class Piece(msgspec.Struct, frozen=True):
    """Text of the answer, or of its reasoning."""

    text: str
    reasoning: bool = False


class TurnFigures(msgspec.Struct, frozen=True, kw_only=True):
    """``ttft_s``: from sending to the first text. ``tokens_per_s``: of the tokens after the first one; None below two tokens."""

    ttft_s: float | None
    tokens_per_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str

    def __str__(self) -> str:
        ttft = "no output" if self.ttft_s is None else f"TTFT {self.ttft_s * 1000:.0f} ms"
        speed = "" if self.tokens_per_s is None else f" · {self.tokens_per_s:.1f} tokens/s"
        share = self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
        return (
            f"{ttft}{speed} · {self.output_tokens} tokens out ({self.finish_reason}) · "
            f"{self.prompt_tokens} in, {self.cached_tokens} cached ({share:.0%})"
        )


def sse_data(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The data of each server-sent event, up to ``[DONE]``."""
    parts: list[bytes] = []
    for raw in lines:
        line = raw.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            parts.append(line[5:].removeprefix(b" "))
        elif not line and parts:
            data = b"\n".join(parts)
            parts = []
            if data == b"[DONE]":
                return
            yield data


class Turn:
    """Iterate once for the pieces; then ``figures`` holds."""

    def __init__(self, chunks: Iterable[bytes], sent_at: float) -> None:
        self._chunks = chunks
        self._sent_at = sent_at
        self._first_at: float | None = None
        self._last_at: float | None = None
        self._usage = _Usage()
        self._finish_reason = ""

    def __iter__(self) -> Iterator[Piece]:
        decoder = msgspec.json.Decoder(_Chunk)
        for data in self._chunks:
            try:
                chunk = decoder.decode(data)
            except msgspec.DecodeError as error:
                raise ChatFailed(f"the server sent something that is no chat chunk: {error}") from error
            if chunk.error is not None:
                raise ChatFailed(chunk.error.message)
            self._usage = chunk.usage or self._usage
            for choice in chunk.choices:
                self._finish_reason = choice.finish_reason or self._finish_reason
                yield from self._pieces(choice.delta)
        if not self._finish_reason:
            raise ChatFailed("the stream ended before the answer did")

    def _pieces(self, delta: _Delta) -> Iterator[Piece]:
        for text, reasoning in ((delta.reasoning_content, True), (delta.content, False)):
            if text:
                self._last_at = time.monotonic()
                self._first_at = self._first_at or self._last_at
                yield Piece(text, reasoning)

    @property
    def figures(self) -> TurnFigures:
        details = self._usage.prompt_tokens_details
        output_tokens = self._usage.completion_tokens
        speed = None
        if (
            self._first_at is not None
            and self._last_at is not None
            and output_tokens > 1
            and self._last_at > self._first_at
        ):
            speed = (output_tokens - 1) / (self._last_at - self._first_at)
        return TurnFigures(
            ttft_s=None if self._first_at is None else self._first_at - self._sent_at,
            tokens_per_s=speed,
            prompt_tokens=self._usage.prompt_tokens,
            cached_tokens=details.cached_tokens if details else 0,
            output_tokens=output_tokens,
            finish_reason=self._finish_reason or "broken off",
        )


class ChatClient:
    """``timeout_s``: longest silence of the server."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 300.0) -> None:
        self._address = ServerAddress(url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s

    def models(self) -> list[str]:
        """Raise ChatFailed."""
        connection, response = self._send("GET", "/v1/models", b"")
        try:
            return [model.id for model in msgspec.json.decode(response.read(), type=_ModelList).data]
        except msgspec.DecodeError as error:
            raise ChatFailed(f"the server's list of models cannot be read: {error}") from error
        finally:
            connection.close()

    def turn(
        self, model: str, messages: list[Message], max_tokens: int | None, temperature: float | None
    ) -> Generator[Turn, None, None]:
        """One turn to iterate; closing the generator ends the request. Raise ChatFailed."""
        body = {
            "model": model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({} if max_tokens is None else {"max_tokens": max_tokens}),
            **({} if temperature is None else {"temperature": temperature}),
        }
        sent_at = time.monotonic()
        connection, response = self._send("POST", "/v1/chat/completions", msgspec.json.encode(body))
        try:
            yield Turn(sse_data(response), sent_at)
        except (OSError, http.client.HTTPException) as error:
            raise ChatFailed(f"the connection broke: {error}") from error
        finally:
            connection.close()

    def _send(self, method: str, path: str, body: bytes) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._address.connection(self._timeout_s)
        headers = {"Content-Type": "application/json", **self._headers}
        try:
            connection.request(method, self._address.path(path), body or None, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ChatFailed(f"{self._address.url} does not answer: {error}") from error
        if response.status != 200:
            text = _error_text(response.read())
            connection.close()
            raise ChatFailed(f"HTTP {response.status}: {text}")
        return connection, response


class _ErrorBody(msgspec.Struct):
    error: _Error


def _error_text(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.message
    except msgspec.DecodeError:
        return body[:300].decode(errors="replace")
