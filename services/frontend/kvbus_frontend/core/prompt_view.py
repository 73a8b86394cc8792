"""A rendered prompt in pieces: control tokens, texts of fields, and what the template wrote around them, with tokens and blocks."""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import msgspec

from kvbus_blocks.keys import KEY_BYTES
from kvbus_frontend.core.field_marks import Span
from kvbus_frontend.core.prompt import Prompt
from kvbus_protocols.prompt_view import PromptBlock, PromptSegment
from kvbus_tokenizers import Segment, Tokenizer
from kvbus_wire.packing import unpack_tokens


class Piece(msgspec.Struct, frozen=True):
    """``start``, ``end``: in the text of its segment."""

    start: int
    end: int
    span: Span | None


def segments_of(
    segments: Sequence[Segment], spans: Sequence[Span], tokenizer: Tokenizer
) -> tuple[list[PromptSegment], list[int | None]]:
    """The pieces of a prompt, and where in its text each of its tokens begins. ``spans``: in order, without overlaps."""
    pieces: list[PromptSegment] = []
    token_chars: list[int | None] = []
    start_char = 0
    for segment, packed in zip(segments, tokenizer.encode_packed(segments), strict=True):
        token_ids = unpack_tokens(packed)
        begins = _token_chars(segment.text, token_ids, tokenizer.token_bytes)
        first = len(token_chars)
        cut = list(_pieces(segment.text, start_char, spans))
        for piece in cut:
            start: int | None = first + bisect_left(begins, piece.start) if begins is not None else None
            end: int | None = first + bisect_left(begins, piece.end) if begins is not None else None
            if piece.start == 0:
                start = first
            if piece.end == len(segment.text):
                end = first + len(token_ids)
            tokens = end - start if start is not None and end is not None else None
            pieces.append(_segment(segment, piece, start_char, start, tokens))
        if not cut:  # a token without text
            pieces.append(
                PromptSegment(
                    text=segment.text, start=first, tokens=len(token_ids), special=segment.token_id is not None
                )
            )
        token_chars += [None] * len(token_ids) if begins is None else [start_char + char for char in begins]
        start_char += len(segment.text)
    return pieces, token_chars


def blocks_of(prompt: Prompt, token_chars: Sequence[int | None]) -> list[PromptBlock]:
    """The whole blocks. ``token_chars``: where tokens begin, as far as that is known."""
    keys, chars = prompt.keys, dict(enumerate(token_chars))
    return [
        PromptBlock(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES].hex(), chars.get(at * prompt.block_size))
        for at in range(prompt.blocks)
    ]


def _pieces(text: str, offset: int, spans: Sequence[Span]) -> Iterator[Piece]:
    """``offset``: of the text in the prompt."""
    position, end = 0, len(text)
    for at in range(bisect_left(spans, offset + 1, key=lambda span: span.end), len(spans)):
        span = spans[at]
        start = max(span.start - offset, 0)
        if start >= end:
            break
        if start > position:
            yield Piece(position, start, None)
        position = min(span.end - offset, end)
        yield Piece(start, position, span)
    if position < end:
        yield Piece(position, end, None)


def _segment(segment: Segment, piece: Piece, offset: int, start: int | None, tokens: int | None) -> PromptSegment:
    shown = PromptSegment(
        text=segment.text[piece.start : piece.end],
        start=start,
        tokens=tokens,
        special=segment.token_id is not None,
        source=_source(segment, piece.span),
    )
    if piece.span is None or not piece.span.field.text:
        return shown
    field = piece.span.field
    before = offset + piece.start - piece.span.start  # control tokens cut the text of a field
    if field.text[before : before + len(shown.text)] == shown.text:
        return msgspec.structs.replace(shown, offset=field.skipped + before)
    if json.dumps(field.text, ensure_ascii=False)[1:-1] == shown.text:
        return msgspec.structs.replace(shown, offset=field.skipped, escaped=True)
    return shown


def _source(segment: Segment, span: Span | None) -> str | None:
    """A control token between the texts of a tool or a call is the template's."""
    if span is None or (segment.token_id is not None and not span.field.text):
        return None
    return span.field.path


def _token_chars(text: str, token_ids: Sequence[int], token_bytes: Callable[[int], bytes]) -> list[int] | None:
    """Where each token of a text begins; one that begins within a character counts as beginning with it. None for a tokenizer that
    writes the text in another form."""
    data, sizes = text.encode(), [len(token_bytes(token_id)) for token_id in token_ids]
    surplus = sum(sizes) - len(data)
    joined = b"".join(map(token_bytes, token_ids))
    if joined != data and joined != b" " * surplus + data:
        return None
    chars: list[int] = []
    position = char = 0
    for begin in (0, *accumulate(sizes)):
        target = max(begin - max(surplus, 0), 0)
        while target < len(data) and data[target] & 0xC0 == 0x80:
            target -= 1
        if target > position:
            char += len(data[position:target].decode())
            position = target
        chars.append(char)
    return chars[: len(token_ids)]
