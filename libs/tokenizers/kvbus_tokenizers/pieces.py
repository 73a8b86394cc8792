"""The bytes behind a token id, for the two families of decoders that language models use.

Byte-level BPE (GPT-2, Llama 3, Qwen, DeepSeek, gpt-oss): every character of the vocabulary stands for one byte.
SentencePiece style (Llama 2, Mistral, Gemma): U+2581 stands for a space and ``<0xE2>`` for a byte; some of these decoders drop one
space at the very start of a text.
"""

import re
from dataclasses import dataclass
from typing import Protocol

from kvbus_tokenizers.errors import TokenizerUnsupported
from kvbus_tokenizers.spec import DecoderStep

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class PieceDecoder(Protocol):
    """``strip_start``: how many leading spaces the decoder drops at the start of a text."""

    @property
    def strip_start(self) -> int: ...

    def bytes_of(self, piece: str) -> bytes:
        """The bytes that a vocabulary entry (no added token) stands for."""

    def bytes_of_added(self, content: str, *, special: bool) -> bytes:
        """The bytes that an added token stands for."""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's map of bytes to printable characters, reversed."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class ByteLevelPieces:
    strip_start: int = 0

    def bytes_of(self, piece: str) -> bytes:
        try:
            return bytes([BYTE_ALPHABET[char] for char in piece])
        except KeyError:  # a vocabulary entry outside the alphabet is its own text, as the reference decoder has it
            return piece.encode()

    def bytes_of_added(self, content: str, *, special: bool) -> bytes:
        return content.encode()


@dataclass(frozen=True, slots=True)
class SentencePieces:
    space: str = "\u2581"
    byte_fallback: bool = True
    strip_start: int = 0

    def bytes_of(self, piece: str) -> bytes:
        if self.byte_fallback and (match := _BYTE_TOKEN.match(piece)) is not None:
            return bytes([int(match[1], 16)])
        return piece.replace(self.space, " ").encode()

    def bytes_of_added(self, content: str, *, special: bool) -> bytes:
        # Gemma keeps runs of spaces as added tokens, in the vocabulary's spelling.
        return content.encode() if special else content.replace(self.space, " ").encode()


def piece_decoder(decoder: DecoderStep | None) -> PieceDecoder:
    """Raise TokenizerUnsupported for a decoder whose text depends on more than the token itself."""
    if decoder is None:
        return SentencePieces(byte_fallback=False)
    if decoder.type == "ByteLevel":
        return ByteLevelPieces()
    if decoder.type == "Metaspace":
        strips = decoder.prepend_scheme != "never" and decoder.add_prefix_space is not False
        return SentencePieces(space=decoder.replacement, byte_fallback=False, strip_start=int(strips))
    if decoder.type == "Sequence":
        return _from_sequence(decoder.decoders)
    raise TokenizerUnsupported(f"the decoder {decoder.type!r} is not supported")


def _from_sequence(steps: list[DecoderStep]) -> PieceDecoder:
    space, byte_fallback, strip_start = "\u2581", False, 0
    for step in steps:
        match step.type:
            case "ByteLevel":
                return ByteLevelPieces()
            case "ByteFallback":
                byte_fallback = True
            case "Replace" if step.content == " " and "String" in step.pattern:
                space = step.pattern["String"]
            case "Metaspace":
                space = step.replacement
                strip_start = int(step.prepend_scheme != "never" and step.add_prefix_space is not False)
            case "Strip" if step.content == " " and step.stop == 0:
                strip_start = step.start
            case "Fuse":
                pass
            case _:
                raise TokenizerUnsupported(f"the decoder step {step.type!r} is not supported")
    return SentencePieces(space=space, byte_fallback=byte_fallback, strip_start=strip_start)
