"""The few calls of JetStream's API that kvbus needs, over `Bus.request_bytes`, so that they live through outages like any request.

Wire format: NATS ADR-1 (JSON API), ADR-8 (key-value), ADR-20 (object store), ADR-31 (direct get), ADR-43 (per-message TTL).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvbus_runtime.bus import Bus, Reply
from kvbus_runtime.errors import RequestFailed
from kvbus_wire.errors import ErrorCode

API_TIMEOUT_S = 5.0
NANOSECONDS = 1_000_000_000

WRONG_LAST_SEQUENCE = (10071, 10164)
STREAM_NAME_IN_USE = 10058
STREAM_NOT_FOUND = 10059

HEADER_TTL = "Nats-TTL"
HEADER_EXPECTED_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
HEADER_MARKER_REASON = "Nats-Marker-Reason"
HEADER_KV_OPERATION = "KV-Operation"
HEADER_ROLLUP = "Nats-Rollup"


class JetStreamRefused(Exception):
    """JetStream answered with an error; ``err_code`` as in its API."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"{description} ({err_code})")
        self.code = code
        self.err_code = err_code


def unavailable(refused: JetStreamRefused) -> RequestFailed:
    """What a caller is told that knows nothing of JetStream: it may go well later."""
    return RequestFailed.of(ErrorCode.UNAVAILABLE, str(refused), retryable=True)


class _Error(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Response(msgspec.Struct):
    error: _Error | None = None


class StreamState(msgspec.Struct):
    first_seq: int = 0
    last_seq: int = 0
    bytes: int = 0
    messages: int = 0


class StreamInfo(msgspec.Struct):
    """``created`` tells two streams of the same name apart."""

    created: str
    state: StreamState = msgspec.field(default_factory=StreamState)


class ConsumerInfo(msgspec.Struct):
    """``num_pending``: messages that were there when the consumer was made and are still to come."""

    name: str
    num_pending: int = 0


class PubAck(msgspec.Struct):
    seq: int
    duplicate: bool = False


class StoredMessage(msgspec.Struct, frozen=True):
    """A message of a stream, read directly."""

    subject: str
    seq: int
    data: bytes
    headers: Mapping[str, str]

    @property
    def is_marker(self) -> bool:
        """The entry says that the key is gone (deleted, purged or expired)."""
        return is_marker(self.headers)


def is_marker(headers: Mapping[str, str]) -> bool:
    return HEADER_MARKER_REASON in headers or headers.get(HEADER_KV_OPERATION) in ("DEL", "PURGE")


def _checked(reply: Reply) -> bytes:
    try:
        error = msgspec.json.decode(reply.data, type=_Response).error
    except msgspec.DecodeError as problem:
        raise RequestFailed.of(ErrorCode.UNAVAILABLE, f"bad JetStream reply: {problem}", retryable=True) from problem
    if error is not None:
        raise JetStreamRefused(error.code, error.err_code, error.description)
    return reply.data


async def call(bus: Bus, operation: str, body: Mapping[str, Any] | None = None) -> bytes:
    """Ask ``$JS.API.<operation>``. Raise JetStreamRefused, or RequestFailed when nobody answers."""
    data = msgspec.json.encode(body) if body is not None else b""
    return _checked(await bus.request_bytes(f"$JS.API.{operation}", data, timeout_s=API_TIMEOUT_S))


async def ensure_stream(bus: Bus, config: Mapping[str, Any]) -> StreamInfo:
    """Create the stream, or bring an existing one to this configuration. The storage type of an existing one stays."""
    name = config["name"]
    try:
        answer = await call(bus, f"STREAM.CREATE.{name}", config)
    except JetStreamRefused as refused:
        if refused.err_code != STREAM_NAME_IN_USE:
            raise
        try:
            answer = await call(bus, f"STREAM.UPDATE.{name}", config)
        except JetStreamRefused as update:
            # What cannot be changed in place (storage, say) is left as its owner made it.
            bus.log.warning("stream_differs", stream=name, reason=str(update))
            answer = await call(bus, f"STREAM.INFO.{name}")
    return msgspec.json.decode(answer, type=StreamInfo)


async def stream_info(bus: Bus, stream: str) -> StreamInfo | None:
    """None when there is no such stream."""
    try:
        return msgspec.json.decode(await call(bus, f"STREAM.INFO.{stream}"), type=StreamInfo)
    except JetStreamRefused as refused:
        if refused.err_code == STREAM_NOT_FOUND:
            return None
        raise


class _Subjects(msgspec.Struct):
    subjects: dict[str, int] = {}


class _StreamSubjects(msgspec.Struct):
    state: _Subjects = msgspec.field(default_factory=_Subjects)


async def subjects_of(bus: Bus, stream: str, subject_filter: str) -> list[str]:
    """The subjects below a filter of which the stream holds messages; none when there is no such stream."""
    try:
        answer = await call(bus, f"STREAM.INFO.{stream}", {"subjects_filter": subject_filter})
    except JetStreamRefused as refused:
        if refused.err_code == STREAM_NOT_FOUND:
            return []
        raise
    return list(msgspec.json.decode(answer, type=_StreamSubjects).state.subjects)


async def create_consumer(bus: Bus, stream: str, config: Mapping[str, Any]) -> ConsumerInfo:
    name, subject = config["name"], config.get("filter_subject", "")
    operation = f"CONSUMER.CREATE.{stream}.{name}" + (f".{subject}" if subject else "")
    answer = await call(bus, operation, {"stream_name": stream, "config": config})
    return msgspec.json.decode(answer, type=ConsumerInfo)


async def publish(
    bus: Bus, subject: str, data: bytes, headers: Mapping[str, str], *, timeout_s: float = API_TIMEOUT_S
) -> PubAck:
    """Publish into whatever stream takes the subject and wait until it is stored."""
    reply = await bus.request_bytes(subject, data, timeout_s=timeout_s, headers=headers)
    return msgspec.json.decode(_checked(reply), type=PubAck)


async def last_message(bus: Bus, stream: str, subject: str) -> StoredMessage | None:
    """The newest message of a subject, None when there is none. The stream needs ``allow_direct``."""
    return await _direct(bus, stream, {"last_by_subj": subject})


async def next_message(bus: Bus, stream: str, subject: str, seq: int) -> StoredMessage | None:
    """The first message of a subject from sequence ``seq`` on, None when there is none."""
    return await _direct(bus, stream, {"seq": seq, "next_by_subj": subject})


async def _direct(bus: Bus, stream: str, query: Mapping[str, Any]) -> StoredMessage | None:
    data = msgspec.json.encode(query)
    reply = await bus.request_bytes(f"$JS.API.DIRECT.GET.{stream}", data, timeout_s=API_TIMEOUT_S)
    status = reply.headers.get("Status", "")
    if status == "404":
        return None
    if status:
        raise JetStreamRefused(int(status) if status.isdigit() else 0, 0, reply.headers.get("Description", "refused"))
    headers = reply.headers
    return StoredMessage(headers["Nats-Subject"], int(headers["Nats-Sequence"]), reply.data, headers)
