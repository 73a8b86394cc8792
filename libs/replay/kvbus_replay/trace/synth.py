"""Made-up agent sessions with the published shape of such traffic.

A session begins with one of a few system prompts (text and tools of a harness), then calls the model dozens of times, each time
with its whole history: prompt, output, tool result, prompt, .. Between two calls a tool runs. Now and then a call fans out to
sub-agents, which begin at the same moment with the same brief, and the session goes on when all have ended. A tool may itself call
the model, with a text that nobody sees again; and instead of a tool it may be the user who answers, which takes longer. A session
whose context gets too long is compacted: the model condenses it, and the session goes on with system prompt and summary.
"""

import math
from collections.abc import Iterator
from random import Random

import msgspec

from kvbus_replay.trace.agent_format import FORMAT_VERSION, CallLine, Header, Line, PrefixLine

_SHARES = ("reasoning_share", "fan_out", "side_calls", "user_turns")
_LARGEST = 10**9
"""Of all that can be given: what is drawn around it can still be counted."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths in tokens. Pairs are the least and the most of what is drawn evenly, ``system_tokens`` evenly in the logarithm;
    ``typical`` ones are medians of log-normal draws.

    ``sessions_per_s``: how many begin per second on average. ``fan_out``: probability that a call is followed by sub-agents;
    ``side_calls``: by a tool that itself calls the model once, with ``side_call_tokens`` (evenly in the logarithm, too);
    ``user_turns``: by a message of the user.
    ``keeps_reasoning``: the next prompt holds the reasoning of the last output; else it parts from it where the reasoning began.
    """

    sessions: int = 100
    sessions_per_s: float = 1.0
    typical_calls: float = 36.0
    harnesses: int = 6
    system_tokens: tuple[int, int] = (10_000, 50_000)
    user_tokens: tuple[int, int] = (100, 2_000)
    typical_tool_tokens: float = 600.0
    max_tool_tokens: int = 16_000
    typical_output_tokens: float = 300.0
    max_output_tokens: int = 4_000
    reasoning_share: float = 0.4
    keeps_reasoning: bool = True
    pause_s: tuple[float, float] = (2.0, 30.0)
    fan_out: float = 0.04
    sub_agents: tuple[int, int] = (2, 4)
    sub_agent_calls: tuple[int, int] = (3, 8)
    sub_agent_system_tokens: tuple[int, int] = (4_000, 12_000)
    brief_tokens: tuple[int, int] = (1_000, 6_000)
    side_calls: float = 0.0
    side_call_tokens: tuple[int, int] = (2_000, 25_000)
    user_turns: float = 0.0
    user_pause_s: tuple[float, float] = (30.0, 240.0)
    compaction_tokens: int = 120_000
    summary_tokens: tuple[int, int] = (800, 2_500)
    block_size: int = 16

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be drawn from."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, bool):
                continue
            least, most = value if isinstance(value, tuple) else (value, value)
            if name in _SHARES:
                if not 0 <= value <= 1:
                    raise ValueError(f"{name} must be between 0 and 1")
            elif not least <= most or least < 0 or (not least and name != "pause_s"):
                raise ValueError(f"{name} must be positive, and the least not more than the most")
            elif most > _LARGEST:
                raise ValueError(f"{name} must be at most {_LARGEST}")


class _Prefix(msgspec.Struct, frozen=True):
    name: str
    tokens: int


class _Conversation:
    """The growing prompt of one session. Each `call` says what is new since the last one."""

    def __init__(self, maker: "_Maker", session_id: str, start: _Prefix, parent: str | None = None) -> None:
        self.session_id = session_id
        self._maker = maker
        self._parent = parent
        self._base = start
        self._blocks = start.tokens // maker.shape.block_size
        self._calls = 0
        self.tokens = start.tokens

    def restart(self, start: _Prefix) -> None:
        self._base, self._blocks, self.tokens = start, start.tokens // self._maker.shape.block_size, start.tokens

    def call(
        self,
        new_tokens: int,
        output_tokens: int,
        *,
        at_s: float = 0.0,
        after: tuple[str, ...] = (),
        pause_s: float = 0.0,
        trigger: str = "tool",
        final: bool = False,
    ) -> CallLine:
        maker, shape = self._maker, self._maker.shape
        size = shape.block_size
        prompt = self.tokens + new_tokens
        keep = min(self._blocks, prompt // size)
        reasoning = min(output_tokens - 1, round(output_tokens * shape.reasoning_share))
        whole = (prompt + output_tokens) // size
        line = CallLine(
            id=f"{self.session_id}/{self._calls}",
            session=self.session_id,
            parent=self._parent,
            prompt_tokens=prompt,
            output_tokens=output_tokens,
            reasoning_tokens=reasoning,
            base=self._base.name,
            keep=keep,
            hashes=maker.hashes(prompt // size - keep),
            output_hashes=maker.hashes(whole - prompt // size),
            at_s=at_s,
            after=after,
            pause_s=pause_s,
            trigger=trigger,
            final=final,
        )
        self._calls += 1
        if shape.keeps_reasoning:
            self.tokens, self._blocks = prompt + output_tokens, whole
        else:
            self.tokens, self._blocks = prompt + output_tokens - reasoning, prompt // size
        self._base = _Prefix(self.session_id, self.tokens)
        return line


class _Maker:
    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.rng = Random(seed)

    def hashes(self, count: int) -> list[int]:
        return [self.rng.getrandbits(64) for _ in range(count)]

    def whole(self, bounds: tuple[int, int]) -> int:
        return self.rng.randint(*bounds)

    def log_whole(self, bounds: tuple[int, int]) -> int:
        low, high = bounds
        return round(math.exp(self.rng.uniform(math.log(low), math.log(high))))

    def log_normal(self, median: float, sigma: float, most: int) -> int:
        return max(1, min(round(median * math.exp(self.rng.gauss(0.0, sigma))), most))

    def prefix(self, name: str, tokens: int, base: _Prefix | None = None) -> tuple[_Prefix, PrefixLine]:
        size = self.shape.block_size
        total = tokens + (0 if base is None else base.tokens)
        keep = 0 if base is None else base.tokens // size
        hashes = self.hashes(total // size - keep)
        line = PrefixLine(name=name, hashes=hashes, base="" if base is None else base.name, keep=keep)
        return _Prefix(name, total), line

    def output_tokens(self) -> int:
        return self.log_normal(self.shape.typical_output_tokens, 0.8, self.shape.max_output_tokens)

    def tool_tokens(self) -> int:
        return self.log_normal(self.shape.typical_tool_tokens, 1.2, self.shape.max_tool_tokens)


def synthesize(shape: Shape, seed: int) -> Iterator[Line]:
    """The lines of a trace; equal ones for equal arguments."""
    maker = _Maker(shape, seed)
    rng = maker.rng
    yield Header(
        version=FORMAT_VERSION,
        block_size=shape.block_size,
        source="kvbus trace synth",
        notes={"seed": seed, "sessions": shape.sessions, "sessions_per_s": shape.sessions_per_s},
    )
    harnesses: list[tuple[_Prefix, _Prefix]] = []
    for number in range(shape.harnesses):
        system, line = maker.prefix(f"system-{number}", maker.log_whole(shape.system_tokens))
        yield line
        sub_system, line = maker.prefix(f"sub-system-{number}", maker.log_whole(shape.sub_agent_system_tokens))
        yield line
        harnesses.append((system, sub_system))
    popularity = [1 / (rank + 1) for rank in range(shape.harnesses)]
    at_s = 0.0
    for number in range(shape.sessions):
        (system, sub_system), *_ = rng.choices(harnesses, popularity)
        yield from _session(maker, f"s{number}", system, sub_system, at_s)
        at_s += rng.expovariate(shape.sessions_per_s)


def _session(maker: _Maker, session_id: str, system: _Prefix, sub_system: _Prefix, at_s: float) -> Iterator[Line]:
    shape, rng = maker.shape, maker.rng
    conversation = _Conversation(maker, session_id, system)
    calls = maker.log_normal(shape.typical_calls, 0.5, 400)
    line = conversation.call(
        maker.whole(shape.user_tokens), maker.output_tokens(), at_s=at_s, trigger="user", final=calls == 1
    )
    yield line
    for number in range(1, calls):
        after: tuple[str, ...] = (line.id,)
        trigger, pause_s = "tool", rng.uniform(*shape.pause_s)
        if shape.user_turns and rng.random() < shape.user_turns:
            trigger, pause_s = "user", rng.uniform(*shape.user_pause_s)
        elif shape.side_calls and rng.random() < shape.side_calls:
            side_line = _side_call(maker, line)
            yield side_line
            after = (line.id, side_line.id)
        elif rng.random() < shape.fan_out:
            ends = []
            for sub_line in _sub_agents(maker, line, sub_system):
                yield sub_line
                if isinstance(sub_line, CallLine) and sub_line.final:
                    ends.append(sub_line.id)
            after, pause_s = (line.id, *ends), 0.5
        final = number == calls - 1
        new = maker.tool_tokens()
        if conversation.tokens + new > shape.compaction_tokens:
            line = conversation.call(
                new, maker.whole(shape.summary_tokens), after=after, pause_s=pause_s, trigger=trigger, final=final
            )
            conversation.restart(system)
            if not final:
                yield line
                # The summary is what the next prompt has behind the system prompt.
                new, after, pause_s = line.output_tokens + maker.whole(shape.user_tokens), (line.id,), 0.5
                line = conversation.call(new, maker.output_tokens(), after=after, pause_s=pause_s)
        else:
            line = conversation.call(
                new, maker.output_tokens(), after=after, pause_s=pause_s, trigger=trigger, final=final
            )
        yield line


def _side_call(maker: _Maker, caller: CallLine) -> CallLine:
    """One that a tool makes, with a text of its own: a page to be condensed, say."""
    conversation = _Conversation(maker, f"{caller.id}/side", _Prefix("", 0), parent=caller.session)
    tokens = maker.log_whole(maker.shape.side_call_tokens)
    return conversation.call(tokens, maker.output_tokens(), after=(caller.id,), pause_s=0.5, final=True)


def _sub_agents(maker: _Maker, caller: CallLine, system: _Prefix) -> Iterator[Line]:
    """Some that begin together: system prompt and brief in common, the task of each its own."""
    shape = maker.shape
    brief, line = maker.prefix(f"{caller.id}/brief", maker.whole(shape.brief_tokens), system)
    yield line
    for number in range(maker.whole(shape.sub_agents)):
        conversation = _Conversation(maker, f"{caller.id}/sub-{number}", brief, parent=caller.session)
        calls = maker.whole(shape.sub_agent_calls)
        before, pause_s = caller.id, 0.5
        for turn in range(calls):
            new = maker.whole(shape.user_tokens) if turn == 0 else maker.tool_tokens()
            call = conversation.call(
                new,
                maker.output_tokens(),
                after=(before,),
                pause_s=pause_s,
                trigger="user" if turn == 0 else "tool",
                final=turn == calls - 1,
            )
            yield call
            before, pause_s = call.id, maker.rng.uniform(*shape.pause_s)
