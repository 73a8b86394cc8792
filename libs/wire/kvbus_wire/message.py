"""The base of every bus message and its codec (msgpack by msgspec).

A message is a frozen struct, tagged with the snake-case form of its class name in the field ``type``. Messages evolve by
new fields with defaults only: a field never changes its type, a tag is never used twice, and unknown fields are skipped, so
old and new processes can talk to each other.
"""

import re
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

CONTENT_TYPE = "application/vnd.kvbus.v1+msgpack"
CONTENT_TYPE_JSON = "application/vnd.kvbus.v1+json"

_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def _tag(class_name: str) -> str:
    return _WORD_START.sub("_", class_name).lower()


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A struct that only occurs inside a message."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=_tag):
    """A struct that is sent on its own."""


class DecodeFailed(Exception):
    """The bytes are no message of the expected type."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


class Decoder(msgspec.Struct, frozen=True):
    """Decodes one message type or a union of message types."""

    _decoder: msgspec.msgpack.Decoder[Any]

    @classmethod
    def of(cls, *types: type[Message]) -> "Decoder":
        union: Any = types[0]
        for other in types[1:]:
            union = union | other
        return cls(msgspec.msgpack.Decoder(union))

    def decode(self, data: bytes) -> Any:
        """Raise DecodeFailed when ``data`` is not one of the types."""
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeFailed(str(error)) from error
