from collections.abc import Sequence

import msgspec

from kvbus_replay.trace.agent_format import AgentTraceReader, CallLine, encode_line
from kvbus_replay.trace.calls import Call
from kvbus_replay.trace.recording import Recorder, RecordingLimits
from kvbus_wire.kv_events import KvEvents, Stored
from kvbus_wire.router import Decision, Progress

MODEL = "m"
SIZE = 4


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def keys(*numbers: int) -> bytes:
    return b"".join(map(key, numbers))


class Bus:
    """What a recorder hears."""

    def __init__(self, secret: bytes = b"secret", **limits: float) -> None:
        self.recorder = Recorder(MODEL, SIZE, secret, msgspec.convert(limits, RecordingLimits))

    def placed(
        self, request_id: str, numbers: Sequence[int], at_s: float, *, model: str = MODEL, extra: int = 1
    ) -> None:
        decision = Decision(
            router_id="r",
            request_id=request_id,
            model=model,
            worker_id="w",
            incarnation=1,
            prompt_tokens=len(numbers) * SIZE + extra,
            uncached_tokens=0,
            expected_output=1,
            keys=keys(*numbers),
            tenant="acme",
        )
        self.recorder.placed(decision, at_s)

    def finished(self, request_id: str, at_s: float, output_tokens: int = 8) -> None:
        progress = Progress(request_id=request_id, model=MODEL, phase="finished", output_tokens=output_tokens)
        self.recorder.progress(progress, at_s)

    def stored(self, parent: int, *numbers: int) -> None:
        event = Stored(parent=key(parent) if parent else b"", keys=keys(*numbers))
        self.recorder.stored(KvEvents(instance_id="w", incarnation=1, model=MODEL, first_seq=1, events=(event,)))

    def lines(self) -> list[CallLine]:
        return list(self.recorder.take_all())

    def calls(self) -> list[Call]:
        raw = [encode_line(self.recorder.header), *map(encode_line, self.lines())]
        return list(AgentTraceReader("recorded").read(raw))


def test_a_prompt_that_begins_with_an_earlier_one_and_its_output_continues_the_session() -> None:
    bus = Bus()
    bus.placed("one", [1, 2], at_s=1.0)
    bus.stored(2, 3, 4)
    bus.finished("one", at_s=3.0)
    bus.placed("two", [1, 2, 3, 4, 5], at_s=7.5)
    bus.finished("two", at_s=9.0)
    one, two = bus.calls()
    assert one.session_id == two.session_id
    assert (two.after, two.pause_s, one.at_s) == ((one.call_id,), 4.5, 1.0)
    assert len(one.chain) == 4
    assert two.chain.hashes()[:4] == one.chain.hashes()
    assert bus.recorder.counts.calls == 2


def test_a_shared_beginning_alone_makes_no_session() -> None:
    bus = Bus()
    for number, name in enumerate(("one", "two")):
        bus.placed(name, [1, 2, 10 + number], at_s=float(number))
        bus.finished(name, at_s=5.0 + number)
    one, two = bus.calls()
    assert one.session_id != two.session_id
    assert two.chain.hashes()[:2] == one.chain.hashes()[:2]
    assert two.after == ()


def test_a_call_that_came_before_the_other_ended_does_not_wait_for_it() -> None:
    bus = Bus()
    bus.placed("one", [1, 2], at_s=0.0)
    bus.placed("two", [1, 2, 3], at_s=1.0)
    bus.finished("one", at_s=2.0)
    bus.finished("two", at_s=3.0)
    one, two = bus.calls()
    assert (two.after, two.at_s) == ((), 1.0)
    assert one.session_id != two.session_id


def test_neither_names_nor_keys_of_the_bus_are_in_the_trace() -> None:
    bus = Bus()
    bus.placed("secret-request", [1, 2], at_s=0.0)
    bus.finished("secret-request", at_s=1.0)
    line = bus.lines()[0]
    assert not {1, 2} & set(line.hashes)
    assert b"secret" not in encode_line(line)
    assert (line.id, line.session) == ("c0", "s0")
    assert line.tenant
    assert "acme" not in line.tenant


def test_the_same_blocks_look_different_in_each_recording() -> None:
    seen = []
    for secret in (b"one", b"other"):
        bus = Bus(secret)
        bus.placed("r", [1, 2], at_s=0.0)
        bus.finished("r", at_s=1.0)
        seen.append(bus.lines()[0].hashes)
    assert not set(seen[0]) & set(seen[1])


def test_a_call_waits_for_late_events_of_its_blocks() -> None:
    bus = Bus(settle_s=1.0)
    bus.placed("one", [1], at_s=0.0)
    bus.finished("one", at_s=1.0)
    assert list(bus.recorder.take(1.9)) == []
    bus.stored(1, 2)
    (line,) = bus.recorder.take(2.0)
    assert len(line.output_hashes) == 1


def test_output_blocks_that_are_not_certain_are_left_out() -> None:
    bus = Bus()
    bus.placed("one", [1], at_s=0.0)
    bus.stored(1, 2)
    bus.stored(1, 3)
    bus.finished("one", at_s=1.0)
    assert bus.lines()[0].output_hashes == []


def test_what_has_no_end_or_no_keys_is_counted_and_other_models_are_not_heard() -> None:
    bus = Bus(open_calls=1)
    bus.placed("first", [1], at_s=0.0)
    bus.placed("second", [1], at_s=0.0)
    bus.placed("third", [], at_s=0.0, extra=SIZE)
    bus.placed("other", [1], at_s=0.0, model="another")
    assert bus.lines() == []
    assert (bus.recorder.counts.unfinished, bus.recorder.counts.without_keys) == (2, 1)


def test_a_migrated_request_is_one_call() -> None:
    bus = Bus()
    bus.placed("one", [1], at_s=1.0)
    bus.placed("one", [1, 2], at_s=2.0)
    bus.finished("one", at_s=3.0)
    (line,) = bus.lines()
    assert (line.at_s, line.prompt_tokens) == (1.0, SIZE + 1)


def test_the_oldest_sessions_are_forgotten_at_the_limit_of_blocks() -> None:
    bus = Bus(blocks=4)
    for number, numbers in enumerate(([1, 2, 3], [4, 5, 6], [1, 2, 3, 7])):
        bus.placed(f"r{number}", numbers, at_s=2.0 * number)
        bus.finished(f"r{number}", at_s=2.0 * number + 1)
    assert [call.after for call in bus.calls()] == [(), (), ()]


def test_equal_prompts_at_the_same_moment_take_no_more_memory_than_the_limit_says() -> None:
    bus = Bus(blocks=10)
    for number in range(50):
        bus.placed(f"r{number}", [1, 2, 3], at_s=0.0)
        bus.placed(f"short{number}", [], at_s=0.0)
        for name in (f"r{number}", f"short{number}"):
            bus.finished(name, at_s=1.0)
    assert len(bus.lines()) == 100
    assert sum(len(session.hashes) for session in bus.recorder._sessions.values()) <= 10
    assert len(bus.recorder._sessions) <= 4


def test_what_lies_below_a_system_prompt_is_not_remembered_one_by_one() -> None:
    bus = Bus()
    for number in range(2, 100):
        bus.stored(1, number)
    assert list(bus.recorder._links.values()) == [None]
    bus.stored(1, 2)
    bus.placed("one", [1], at_s=0.0)
    bus.finished("one", at_s=1.0)
    assert bus.lines()[0].output_hashes == []


def test_one_tenant_has_one_name_in_a_recording() -> None:
    bus = Bus()
    for name in ("one", "two"):
        bus.placed(name, [1], at_s=0.0)
        bus.finished(name, at_s=1.0)
    assert len({line.tenant for line in bus.lines()}) == 1
