"""How many tokens a text has at least, without tokenizing it: a prompt that cannot fit is told so in milliseconds.

For every byte, take the longest token of the vocabulary that holds it. A token of n bytes holds only bytes whose longest token has
n bytes or more, so the sum of 1 / longest(byte) over its bytes is at most 1; and over the bytes of a text, at most the number
of its tokens. This is so where each token stands for its own bytes and no byte is lost on the way, which `bound_of` makes sure of.

Normalization form C changes bytes, but none of an ASCII character that another one follows. The other bytes count least of all and
as a part only.
"""

import re
from collections.abc import Iterable
from itertools import groupby
from typing import Protocol

from kvbus_tokenizers.spec import PipelineStep, TokenizerSpec

NFC_SHRINKS = 4
"""Normalization form C makes no text shorter than this part of its bytes (the worst is 3.5: Greek iota with two accents)."""
_CHUNK = 1 << 20
_SPACE = "\u2581".encode()
_NOT_ASCII = bytes(range(0x80, 0x100))
_MAY_CHANGE = re.compile(rb"[\x00-\x7f]?[\x80-\xff]+")
NFC_TO_ASCII = "\u037e\u1fef\u212a"
"""The characters that normalization makes ASCII: semicolon, grave accent, K."""
_MAY_COME_OF_NFC = b";`K" + bytes(byte for byte in _NOT_ASCII if byte not in b"\xc0\xc1" and byte < 0xF5)


class _Pieces(Protocol):
    def bytes_of(self, piece: str) -> bytes: ...


class LengthBound:
    """``tokens``: of the whole vocabulary, spaces spelled as ``spaces_as``. ``nfc``: text is normalized first."""

    def __init__(self, tokens: Iterable[bytes], *, spaces_as: bytes = b" ", nfc: bool = False) -> None:
        # Longest tokens are rounded up to powers of two, so that a few passes count all bytes.
        table, weights = bytearray(256), [0.0]
        by_length = sorted(tokens, key=len, reverse=True)
        for bits, same in groupby(by_length, key=lambda token: (len(token) - 1).bit_length()):
            for byte in set(b"".join(same)):
                if table[byte] == 0:
                    if weights[-1] != 2.0**-bits:
                        weights.append(2.0**-bits)
                    table[byte] = len(weights) - 1
        self._table = bytes(table)  # 0 and so the weight 0: bytes that no token holds
        self._weights = weights
        self._spaces_as = spaces_as
        self._nfc = nfc
        self._changed_weight = min(weights[table[byte]] for byte in _MAY_COME_OF_NFC) / NFC_SHRINKS

    def least_tokens(self, text: str, *, enough: float) -> float:
        """A number of tokens that the text has or exceeds; where that is more than ``enough``, not all of it is looked at."""
        least = 0.0
        for start in range(0, len(text), _CHUNK):
            piece = text[start : start + _CHUNK]
            if start + _CHUNK < len(text):
                piece = piece[:-1]  # may change with what follows it
            least += self._least(piece.encode())
            if least > enough:
                break
        return least

    def _least(self, data: bytes) -> float:
        changed = 0.0
        if self._nfc and not data.isascii():
            safe = _MAY_CHANGE.sub(b"", data)
            changed = (len(data) - len(data.translate(None, _NOT_ASCII))) * self._changed_weight
            data = safe
        classes = data.replace(b" ", self._spaces_as).translate(self._table)
        return changed + sum(weight * classes.count(i) for i, weight in enumerate(self._weights) if weight)


def bound_of(spec: TokenizerSpec, vocabulary: Iterable[str], pieces: _Pieces) -> LengthBound | None:
    """None for a tokenizer that may drop text, or join more of it into one token than the token spells."""
    model = spec.model
    if model.type != "BPE" or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if any((token.lstrip or token.rstrip) and not token.special for token in spec.added_tokens):
        return None  # they swallow any amount of white space
    normalizers, cuts = _steps(spec.normalizer), _steps(spec.pre_tokenizer)
    if any(cut.type not in ("ByteLevel", "Digits", "Metaspace", "Split") or cut.behavior == "Removed" for cut in cuts):
        return None
    added = [token.content for token in spec.added_tokens if not token.special]
    changes, forms = {step.type for step in normalizers}, {cut.type for cut in cuts}
    if "ByteLevel" in forms and "Metaspace" not in forms and changes <= {"NFC"}:
        return LengthBound([*map(pieces.bytes_of, vocabulary), *map(str.encode, added)], nfc=bool(changes))
    words = list(vocabulary)
    every_byte = {f"<0x{byte:02X}>" for byte in range(256)} <= set(words)
    if "ByteLevel" not in forms and model.byte_fallback and every_byte and all(map(_keeps_text, [*normalizers, *cuts])):
        tokens = [*map(pieces.bytes_of, words), *map(str.encode, added)]
        return LengthBound([token.replace(b" ", _SPACE) for token in tokens], spaces_as=_SPACE)
    return None


def _keeps_text(step: PipelineStep) -> bool:
    """Or puts something before it, or writes spaces as U+2581."""
    match step.type:
        case "Replace":
            return step.pattern == {"String": " "} and step.content == "\u2581"
        case "Metaspace":
            return step.replacement == "\u2581"
        case kind:
            return kind in ("Prepend", "Split", "Digits")


def _steps(step: PipelineStep | None) -> list[PipelineStep]:
    if step is None:
        return []
    return [step] if step.type != "Sequence" else [one for inner in step.steps for one in _steps(inner)]
