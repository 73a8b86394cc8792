"""What callers say of their blocks, in virtual time."""

import json
from pathlib import Path
from random import Random

import msgspec
import pytest

from kvbus_blocks.plain_index import PlainIndex
from kvbus_replay import command, synth_command
from kvbus_replay.simulation.cluster import Cluster, ClusterShape
from kvbus_replay.simulation.hints import Hints, Retention
from kvbus_replay.simulation.host_tier import HostShape
from kvbus_replay.simulation.sessions import OpenSessions
from kvbus_replay.simulation.workers import WorkerShape
from kvbus_replay.trace.calls import Call, Chain, Trace
from kvbus_router.core.policies import BUILT_IN

SIZE = 16


def turn(
    session: str, number: int, blocks: int, *, first: int, at_s: float, final: bool = False, base: Chain | None = None
) -> Call:
    """A call whose prompt fills ``blocks``; the chain of a session is numbered from ``first`` on."""
    return Call(
        call_id=f"{session}/{number}",
        session_id=session,
        chain=Chain(range(first, first + blocks), base=base, keep=0),
        prompt_tokens=blocks * SIZE,
        output_tokens=1,
        at_s=at_s,
        final=final,
    )


def run(retention: Retention, *calls: Call, blocks: int, g2_blocks: int = 0) -> Cluster:
    shape = ClusterShape(
        workers=1,
        worker=WorkerShape(kv_tokens=blocks * SIZE),
        host=HostShape(g2_tokens=g2_blocks * SIZE),
        retention=retention,
    )
    cluster = Cluster(Trace("calls", SIZE, list(calls)), shape, BUILT_IN["kv"](), rng=Random(0), index=PlainIndex())
    cluster.run()
    for worker in cluster.workers.values():
        worker.scheduler.check_integrity()
    for host in cluster.hosts:
        host.pool.check_integrity()
    return cluster


def ended_sessions(count: int) -> list[Call]:
    return [turn(f"s{i}", 0, 30, first=1000 * (i + 1), at_s=10.0 + 10 * i, final=True) for i in range(count)]


@pytest.mark.parametrize(("retention", "recomputed"), [("on", 0), ("lru", 29 * SIZE)])
def test_a_session_that_waits_outlasts_those_that_have_ended(retention: Retention, recomputed: int) -> None:
    waiting = turn("agent", 0, 30, first=1, at_s=0.0), turn("agent", 1, 30, first=1, at_s=100.0)
    cluster = run(retention, *waiting, *ended_sessions(5), blocks=100)
    assert cluster.records.resumed_tokens == 29 * SIZE
    assert cluster.records.recomputed_tokens == recomputed


def test_the_host_hears_what_callers_say_too() -> None:
    waiting = turn("agent", 0, 30, first=1, at_s=0.0), turn("agent", 1, 30, first=1, at_s=100.0)
    cluster = run("on", *waiting, *ended_sessions(5), blocks=40, g2_blocks=80)
    assert cluster.records.recomputed_tokens == 0
    assert cluster.hosts[0].pool.counters.freed > 0


def test_a_history_that_was_condensed_is_dropped() -> None:
    before = turn("agent", 0, 30, first=1, at_s=0.0)
    after = turn("agent", 1, 10, first=500, at_s=10.0)
    end = turn("other", 0, 10, first=900, at_s=20.0)
    cache = run("on", before, after, end, blocks=100).workers["worker-0000"].scheduler.cache
    history = before.chain.keys()
    assert not any(key in cache for key in history)
    cache = run("off", before, after, end, blocks=100).workers["worker-0000"].scheduler.cache
    assert all(key in cache for key in history)


def test_the_head_of_a_session_is_what_its_first_prompt_shares() -> None:
    system = Chain(range(1, 6))
    first = turn("agent", 0, 5, first=50, at_s=0.0)
    shared = Call(
        call_id="b/0",
        session_id="b",
        chain=Chain(range(60, 65), base=system, keep=5),
        prompt_tokens=160,
        output_tokens=1,
    )
    hints = Hints(Trace("calls", SIZE, [first, shared]))
    assert (hints.head("agent"), hints.head("b")) == (0, 5)
    said = hints.said(shared, 10, now_s=7.0)
    assert [(run.start, run.end, run.directive.kind) for run in said] == [(0, 5, "pinned"), (5, 10, "pinned")]
    assert said[0].directive.priority > said[1].directive.priority
    assert hints.is_last(first)


@pytest.mark.parametrize(("retention", "recomputed"), [("on", 0), ("lru", 29 * SIZE)])
def test_what_tools_ask_for_themselves_goes_before_a_session_that_waits(retention: Retention, recomputed: int) -> None:
    waiting = turn("agent", 0, 30, first=1, at_s=0.0), turn("agent", 1, 30, first=1, at_s=100.0)
    asides = [
        msgspec.structs.replace(one, parent_session_id="agent", session_id=f"aside{i}")
        for i, one in enumerate(ended_sessions(5))
    ]
    cluster = run(retention, *waiting, *asides, blocks=70)
    assert cluster.records.recomputed_tokens == recomputed


def test_only_a_session_of_one_call_within_another_is_an_aside() -> None:
    first, last = turn("sub", 0, 5, first=1, at_s=0.0), turn("sub", 1, 5, first=1, at_s=1.0, final=True)
    alone = turn("alone", 0, 5, first=50, at_s=0.0, final=True)
    aside = turn("aside", 0, 5, first=90, at_s=0.0, final=True)
    first, last, aside = (msgspec.structs.replace(one, parent_session_id="alone") for one in (first, last, aside))
    hints = Hints(Trace("calls", SIZE, [first, last, alone, aside]))
    kinds = [{run.directive.kind for run in hints.said(call, 5, now_s=0.0)} for call in (first, last, alone, aside)]
    assert kinds == [{"pinned"}, {"pinned"}, {"pinned"}, {"ephemeral"}]


def test_open_sessions_are_counted_at_their_peak() -> None:
    sessions = OpenSessions()
    assert not sessions.grown("a", 100)
    assert not sessions.grown("b", 50)
    assert sessions.grown("a", 120)
    sessions.ended("a")
    sessions.grown("c", 40)
    assert sessions.peak_tokens == 170


def test_the_command_compares_retentions_under_pressure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    shape = ["--sessions", "6", "--typical-calls", "4", "--harnesses", "1", "--system-tokens", "300", "600"]
    assert synth_command.main([str(trace), "--seed", "1", *shape]) == 0
    flags = ["--workers", "1", "--policy", "kv", "--pressure", "3", "--json", str(out)]
    modes = [word for mode in ("on", "off", "lru") for word in ("--retention", mode)]
    assert command.main([str(trace), *flags, *modes]) == 0
    report = json.loads(out.read_bytes())
    assert list(report["policies"]) == ["kv/on", "kv/off", "kv/lru"]
    result = report["policies"]["kv/on"]
    assert result["retention"] == "on"
    assert 0 <= result["recomputed_share"] <= 1
    assert report["cluster"]["worker"]["kv_tokens"] >= result["working_set_tokens"] / 3 - 1
    assert "each worker holds" in capsys.readouterr().out


def test_without_pressure_the_command_says_why_all_retentions_are_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    shape = ["--sessions", "4", "--typical-calls", "3", "--harnesses", "1", "--system-tokens", "300", "600"]
    assert synth_command.main([str(trace), "--seed", "1", *shape]) == 0
    flags = ["--workers", "1", "--policy", "kv", "--retention", "off", "--retention", "lru"]
    assert command.main([str(trace), *flags]) == 0
    assert "the lines are the same whatever --retention says" in capsys.readouterr().err
    assert command.main([str(trace), "--workers", "1", "--policy", "kv"]) == 0
    assert "the same" not in capsys.readouterr().err
