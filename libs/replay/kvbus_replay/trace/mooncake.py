"""The public Mooncake format: one JSON object per request.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, .., 2353]}

``timestamp`` and ``delay`` are milliseconds, ``hash_ids`` name blocks of 512 tokens, the last of which may be partial (it has no
identity here: engines reuse whole blocks). Rows with one ``session_id`` are turns of one session: a later one comes ``delay`` after
the end of the turn before it or, without a delay, at its timestamp if that turn has ended by then.
"""

from collections.abc import Iterable, Iterator

import msgspec

from kvbus_replay.trace.calls import Call, Chain, TraceError

BLOCK_TOKENS = 512
_MASK = (1 << 64) - 1


class Row(msgspec.Struct, frozen=True):
    """Under each name that a writer may have used."""

    hash_ids: list[int]
    timestamp: float | None = None
    created_time: float | None = None
    input_length: int | None = None
    input_tokens: int | None = None
    output_length: int | None = None
    output_tokens: int | None = None
    session_id: str | int | None = None
    delay: float | None = None
    delay_ms: float | None = None
    priority: int = 0
    strict_priority: int = 0


_decoder = msgspec.json.Decoder(Row)


def read_mooncake(path: str, lines: Iterable[bytes], block_size: int = BLOCK_TOKENS) -> Iterator[Call]:
    """Raise TraceError for the first line that is wrong."""
    last: dict[str, str] = {}
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            row = _decoder.decode(raw)
            call = _call(row, number, last, block_size)
        except (msgspec.DecodeError, ValueError, OverflowError) as problem:
            raise TraceError(path, number, str(problem)) from problem
        last[call.session_id] = call.call_id
        yield call


def _call(row: Row, number: int, last: dict[str, str], block_size: int) -> Call:
    prompt = _one_of("input_length", row.input_length, row.input_tokens)
    output = _one_of("output_length", row.output_length, row.output_tokens)
    if prompt < 1 or output < 0:
        raise ValueError("input_length must be positive, output_length must not be negative")
    blocks = prompt // block_size
    if not blocks <= len(row.hash_ids) <= -(-prompt // block_size):
        raise ValueError(f"{len(row.hash_ids)} hash_ids for {prompt} tokens do not fit to blocks of {block_size}")
    timestamp = row.timestamp if row.timestamp is not None else row.created_time
    delay = row.delay if row.delay is not None else row.delay_ms
    session_id = f"row-{number}" if row.session_id is None else str(row.session_id)
    before = last.get(session_id)
    if timestamp is None and (before is None or delay is None):
        raise ValueError("there is neither a timestamp nor a delay after an earlier turn")
    if (timestamp or 0) < 0 or (delay or 0) < 0:
        raise ValueError("timestamp and delay must not be negative")
    follows = before is not None and delay is not None
    return Call(
        call_id=f"row-{number}",
        session_id=session_id,
        chain=Chain(_chained(row.hash_ids[:blocks])),
        prompt_tokens=prompt,
        output_tokens=max(output, 1),
        at_s=0.0 if follows else (timestamp or 0.0) / 1000,
        after=() if before is None else (before,),
        pause_s=(delay or 0.0) / 1000 if follows else 0.0,
        priority=row.priority,
        strict_priority=row.strict_priority,
    )


def _one_of(name: str, *values: int | None) -> int:
    for value in values:
        if value is not None:
            return value
    raise ValueError(f"there is no {name}")


def _chained(ids: Iterable[int]) -> Iterator[int]:
    """Ids name the whole prefix in most files, but a writer may use one below different parents: make it so.

    (The hash of a tuple of ints is the same in every process.)
    """
    key = 0
    for block_id in ids:
        key = hash((key, block_id)) & _MASK
        yield key
