import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvbus_replay.trace.agent_format import CallLine, encode_line
from kvbus_replay.trace.calls import Call, Chain, Trace, TraceError
from kvbus_replay.trace.reading import read_trace
from kvbus_replay.trace.synth import Shape, synthesize

HEADER: dict[str, Any] = {"kind": "trace", "version": 1, "block_size": 4}
SYSTEM: dict[str, Any] = {"kind": "prefix", "name": "system", "hashes": [1, 2, 3]}


def call(name: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "call", "id": name, "session": "s", "prompt_tokens": 9, "output_tokens": 4, **fields}


def written(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path, *lines: dict[str, Any] | str) -> Trace:
    return read_trace(written(path / "trace.jsonl", *lines))


def hashes(call: Call) -> list[int]:
    return call.chain.hashes().tolist()


def test_a_call_keeps_blocks_of_a_prefix_or_of_the_call_before_with_its_output(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        HEADER,
        SYSTEM,
        call("a", base="system", keep=2, output_hashes=[7]),
        call("b", base="s", keep=3, hashes=[8], prompt_tokens=17, after=["a"], pause_s=2.5),
        call("c", base="system", keep=1, hashes=[9], final=True),
    )
    assert trace.block_size == 4
    assert [hashes(call) for call in trace.calls] == [[1, 2, 7], [1, 2, 7, 8], [1, 9]]
    assert (trace.calls[1].after, trace.calls[1].pause_s) == (("a",), 2.5)


def test_keys_carry_the_hashes_in_their_low_half(tmp_path: Path) -> None:
    keys = Chain([1, 2**64 - 1]).keys()
    assert keys == [b"\1" + bytes(15), b"\xff" * 8 + bytes(8)]


@pytest.mark.parametrize(
    ("lines", "number", "problem"),
    [
        (("nonsense",), 1, "JSON is malformed"),
        ((HEADER, "{"), 2, "Input data was truncated"),
        ((HEADER, HEADER), 2, "second line of kind trace"),
        (({**HEADER, "version": 2},), 1, "version 2 of the format is not known, 1 is"),
        (({**HEADER, "block_size": 0},), 1, "block_size must be at least 1"),
        ((SYSTEM,), 1, "does not begin with a line of kind trace"),
        ((HEADER, call("a", keep=2)), 2, "2 blocks are kept of 0"),
        ((HEADER, call("a", base="x", keep=2)), 2, "no prefix or living session x"),
        ((HEADER, SYSTEM, SYSTEM), 3, "there is a prefix or session system already"),
        ((HEADER, call("a", hashes=[1])), 2, "0 kept and 1 new blocks, but 9 tokens are 2 whole blocks of 4"),
        (
            (HEADER, call("a", hashes=[1, 2], output_hashes=[1, 2])),
            2,
            "2 output_hashes are more than the output completes",
        ),
        ((HEADER, call("a", hashes=[1, 2]), call("a", hashes=[1, 2])), 3, "there is a call a already"),
        ((HEADER, call("a", hashes=[1, 2], after=["z"])), 2, "it waits for z, which does not come before it"),
        ((HEADER, call("a", hashes=[1, 2], output_tokens=0)), 2, "must be positive"),
        ((HEADER, call("a", hashes=[1, 2], pause_s=-1)), 2, "must not be negative"),
        ((HEADER, call("a", hashes=[1, -2])), 2, "can't convert negative"),
        ((HEADER, {"kind": "other"}), 2, "other"),
        (
            (HEADER, call("a", hashes=[1, 2], final=True), call("b", base="s", keep=2)),
            3,
            "no prefix or living session s",
        ),
    ],
)
def test_a_line_that_is_wrong_is_named_with_the_reason(
    tmp_path: Path, lines: tuple[dict[str, Any] | str, ...], number: int, problem: str
) -> None:
    with pytest.raises(TraceError) as caught:
        read(tmp_path, *lines)
    assert caught.value.line == number
    assert problem in str(caught.value)


def test_a_trace_that_is_empty_or_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="the trace is empty"):
        read(tmp_path)
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "nowhere")


def test_mooncake_rows_are_requests_at_their_timestamps(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        {"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]},
        {"timestamp": 1500, "input_length": 1024, "output_length": 0, "hash_ids": [46, 47]},
    )
    one, two = trace.calls
    assert (trace.block_size, one.at_s, two.at_s, two.output_tokens) == (512, 0.0, 1.5, 1)
    assert hashes(one) == hashes(two)


def test_an_id_below_another_parent_is_another_block(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 1024, "output_length": 1}
    one, two = read(tmp_path, {**row, "hash_ids": [1, 9]}, {**row, "hash_ids": [2, 9]}).calls
    assert not set(hashes(one)) & set(hashes(two))


def test_turns_of_a_mooncake_session_follow_each_other(tmp_path: Path) -> None:
    row = {"input_tokens": 512, "output_tokens": 1, "hash_ids": [1], "session_id": "s"}
    trace = read(tmp_path, {**row, "created_time": 10}, {**row, "delay_ms": 250}, {**row, "created_time": 9000})
    one, two, three = trace.calls
    assert (one.after, two.after, two.pause_s, two.at_s) == ((), (one.call_id,), 0.25, 0.0)
    assert (three.after, three.pause_s, three.at_s) == ((two.call_id,), 0.0, 9.0)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"hash_ids": [1]}, "1 hash_ids for 1100 tokens do not fit to blocks of 512"),
        ({"hash_ids": [1, 2, 3, 4]}, "4 hash_ids"),
        ({"input_length": None}, "there is no input_length"),
        ({"input_length": 0, "hash_ids": []}, "must be positive"),
        ({"timestamp": None}, "neither a timestamp nor a delay"),
        ({"timestamp": -1}, "must not be negative"),
        ({"timestamp": "soon"}, "timestamp"),
    ],
)
def test_a_mooncake_row_that_is_wrong_is_named(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    row = {"timestamp": 0, "input_length": 1100, "output_length": 1, "hash_ids": [1, 2, 3]}
    with pytest.raises(TraceError, match=problem) as caught:
        read(tmp_path, row, {**row, **fields})
    assert caught.value.line == 2


def test_a_made_up_trace_is_the_same_for_the_same_seed_and_reads_back_compressed_too(tmp_path: Path) -> None:
    shape = Shape(sessions=3, fan_out=0.3, compaction_tokens=60_000)
    lines = [encode_line(line) for line in synthesize(shape, 5)]
    assert lines == [encode_line(line) for line in synthesize(shape, 5)]
    assert lines != [encode_line(line) for line in synthesize(shape, 6)]
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(b"\n".join(lines)))
    trace = read_trace(packed)
    assert len(trace.calls) == sum(b'"kind":"call"' in line for line in lines)


def test_a_damaged_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    packed = gzip.compress(b"".join(encode_line(line) + b"\n" for line in synthesize(Shape(sessions=1), 1)))
    for name, data in (("cut", packed[:-100]), ("torn", packed[:200] + bytes(50) + packed[250:])):
        file = tmp_path / f"{name}.gz"
        file.write_bytes(data)
        with pytest.raises(TraceError, match=name):
            read_trace(file)


def test_made_up_sessions_have_the_published_shape() -> None:
    shape = Shape(sessions=60, sessions_per_s=1.0)
    calls = [line for line in synthesize(shape, 1) if isinstance(line, CallLine)]
    main = [line for line in calls if line.parent is None]
    assert 36 < len(main) / shape.sessions < 48
    output, reasoning = sum(c.output_tokens for c in main), sum(c.reasoning_tokens for c in main)
    assert reasoning / output == pytest.approx(0.4, abs=0.01)
    assert all(c.pause_s == 0.5 or 2 <= c.pause_s <= 30 for c in main if c.after)
    assert {c.session for c in calls if c.parent}, "no sub-agents"
    assert any(c.base.startswith("system") and c.after for c in main), "no compaction"
    assert max(c.prompt_tokens for c in calls) < shape.compaction_tokens + shape.max_tool_tokens + 4_000


def test_tools_call_the_model_and_users_answer_as_often_as_asked_for() -> None:
    shape = Shape(sessions=40, side_calls=0.3, user_turns=0.1, fan_out=0.0, user_pause_s=(100.0, 200.0))
    calls = [line for line in synthesize(shape, 1) if isinstance(line, CallLine)]
    main = [c for c in calls if c.parent is None and c.after and c.pause_s != 0.5]
    side = [c for c in calls if c.parent is not None]
    by_user = [c for c in main if c.trigger == "user"]
    assert len(by_user) / len(main) == pytest.approx(0.1, abs=0.02)
    assert all(100 <= c.pause_s <= 200 for c in by_user)
    assert len(side) / (len(main) - len(by_user)) == pytest.approx(0.3, abs=0.03)
    assert all(c.final and not c.base and 2_000 <= c.prompt_tokens <= 25_000 for c in side)
    waited_for = {name for c in main for name in c.after}
    assert {c.id for c in side} <= waited_for


def test_dropped_reasoning_leaves_the_prompt_of_the_last_call_only() -> None:
    shape = Shape(sessions=1, typical_calls=5, fan_out=0.0, keeps_reasoning=False)
    calls = [line for line in synthesize(shape, 1) if isinstance(line, CallLine)]
    assert [c.keep for c in calls[1:]] == [c.prompt_tokens // shape.block_size for c in calls[:-1]]


def test_no_more_calls_are_read_than_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path / "t", HEADER, call("a", hashes=[1, 2]), "not read any more")
    assert [call.call_id for call in read_trace(path, max_calls=1).calls] == ["a"]
