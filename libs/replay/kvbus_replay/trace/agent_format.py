"""Our own trace format, version 1: JSON lines. See the README of this library for what each field means.

{"kind":"trace","version":1,"block_size":16}
{"kind":"prefix","name":"system-0","hashes":[..]}
{"kind":"call","id":"a/0","session":"a","base":"system-0","keep":1250,"hashes":[..],"prompt_tokens":20480,..}
"""

from collections.abc import Callable, Iterable, Iterator

import msgspec

from kvbus_replay.trace.calls import Call, Chain, TraceError

FORMAT_VERSION = 1
MAX_LINE_BYTES = 64 << 20
MAX_LIVE_CHAINS = 1_000_000
"""Prefixes and sessions that a reader keeps at the same time, so that a file without ``final`` cannot take all memory."""

_Hashes = list[int]


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="trace", tag_field="kind", omit_defaults=True):
    """``source``: what made the file. Everything else about it goes into ``notes``."""

    version: int
    block_size: int
    source: str = ""
    notes: dict[str, str | int | float] = {}


class PrefixLine(msgspec.Struct, frozen=True, kw_only=True, tag="prefix", tag_field="kind", omit_defaults=True):
    """What several sessions begin with: the first ``keep`` blocks of ``base``, then ``hashes``."""

    name: str
    hashes: _Hashes
    base: str = ""
    keep: int = 0


class CallLine(msgspec.Struct, frozen=True, kw_only=True, tag="call", tag_field="kind", omit_defaults=True):
    id: str
    session: str
    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int = 0
    base: str = ""
    keep: int = 0
    hashes: _Hashes = []
    output_hashes: _Hashes = []
    parent: str | None = None
    at_s: float = 0.0
    after: tuple[str, ...] = ()
    pause_s: float = 0.0
    priority: int = 0
    strict_priority: int = 0
    trigger: str = "user"
    tenant: str = ""
    final: bool = False


Line = Header | PrefixLine | CallLine

encode_line: Callable[[Line], bytes] = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(Header | PrefixLine | CallLine)


class AgentTraceReader:
    """Turns lines into calls, one by one; keeps the chains of the sessions that have not ended."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._line = 0
        self._header: Header | None = None
        self._chains: dict[str, Chain] = {}
        self._ids: set[str] = set()

    @property
    def block_size(self) -> int:
        """Raise TraceError before the header was read."""
        if self._header is None:
            raise self._error("the trace does not begin with a line of kind trace")
        return self._header.block_size

    def read(self, lines: Iterable[bytes]) -> Iterator[Call]:
        """Raise TraceError for the first line that is wrong."""
        for raw in lines:
            self._line += 1
            if not raw.strip():
                continue
            if len(raw) > MAX_LINE_BYTES:
                raise self._error(f"the line is longer than {MAX_LINE_BYTES} bytes")
            try:
                line = _decoder.decode(raw)
                call = self._take(line)
            except (msgspec.DecodeError, ValueError, OverflowError) as problem:
                raise self._error(str(problem)) from problem
            if call is not None:
                yield call

    def _take(self, line: Line) -> Call | None:
        if isinstance(line, Header):
            self._begin(line)
            return None
        size = self.block_size
        if isinstance(line, PrefixLine):
            if line.name in self._chains:
                raise ValueError(f"there is a prefix or session {line.name} already")
            self._keep(line.name, Chain(line.hashes, self._base(line.base), line.keep))
            return None
        self._check(line, size)
        chain = Chain([*line.hashes, *line.output_hashes], self._base(line.base), line.keep)
        self._ids.add(line.id)
        if line.final:
            self._chains.pop(line.session, None)
        else:
            self._keep(line.session, chain)
        return Call(
            call_id=line.id,
            session_id=line.session,
            chain=chain,
            prompt_tokens=line.prompt_tokens,
            output_tokens=line.output_tokens,
            reasoning_tokens=line.reasoning_tokens,
            parent_session_id=line.parent,
            at_s=line.at_s,
            after=line.after,
            pause_s=line.pause_s,
            priority=line.priority,
            strict_priority=line.strict_priority,
            trigger=line.trigger,
            tenant=line.tenant,
            final=line.final,
        )

    def _base(self, name: str) -> Chain | None:
        base = self._chains.get(name) if name else None
        if name and base is None:
            raise ValueError(f"there is no prefix or living session {name}")
        return base

    def _begin(self, header: Header) -> None:
        if self._header is not None:
            raise ValueError("a second line of kind trace")
        if header.version != FORMAT_VERSION:
            raise ValueError(f"version {header.version} of the format is not known, {FORMAT_VERSION} is")
        if header.block_size < 1:
            raise ValueError("block_size must be at least 1")
        self._header = header

    def _check(self, line: CallLine, size: int) -> None:
        if line.id in self._ids:
            raise ValueError(f"there is a call {line.id} already")
        if line.prompt_tokens < 1 or line.output_tokens < 1 or not 0 <= line.reasoning_tokens <= line.output_tokens:
            raise ValueError("prompt_tokens and output_tokens must be positive, reasoning_tokens a part of the output")
        if line.keep < 0 or line.at_s < 0 or line.pause_s < 0:
            raise ValueError("keep, at_s and pause_s must not be negative")
        blocks = line.prompt_tokens // size
        if line.keep + len(line.hashes) != blocks:
            given = f"{line.keep} kept and {len(line.hashes)} new blocks"
            raise ValueError(f"{given}, but {line.prompt_tokens} tokens are {blocks} whole blocks of {size}")
        if blocks + len(line.output_hashes) > (line.prompt_tokens + line.output_tokens) // size:
            raise ValueError(f"{len(line.output_hashes)} output_hashes are more than the output completes")
        missing = [call_id for call_id in line.after if call_id not in self._ids]
        if missing:
            raise ValueError(f"it waits for {missing[0]}, which does not come before it")

    def _keep(self, name: str, chain: Chain) -> None:
        self._chains[name] = chain
        if len(self._chains) > MAX_LIVE_CHAINS:
            raise ValueError(
                f"more than {MAX_LIVE_CHAINS} prefixes and sessions at the same time: mark ends with final"
            )

    def _error(self, problem: str) -> TraceError:
        return TraceError(self._path, self._line, problem)
