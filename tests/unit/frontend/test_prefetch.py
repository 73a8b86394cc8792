"""What is known of waiting sessions: their prompts, how long tools run, and what is due."""

from kvbus_frontend.core.dispatch import Job
from kvbus_frontend.core.prefetch import PROMPT_BYTES, Agenda, KeptPrompts, ToolTimes, prefetch_at
from kvbus_frontend.core.prompt import Prompt
from kvbus_wire.request import Sampling, Stopping


def job(size: int) -> Job:
    prompt = Prompt(b"t" * size, b"", b"d", 4)
    return Job(
        request_id="r", model="m", prompt=prompt, sampling=Sampling(), stopping=Stopping(max_tokens=1), deadline_ms=0
    )


def test_prompts_are_bounded_in_bytes_and_the_least_recently_used_go() -> None:
    kept = KeptPrompts(3 * (PROMPT_BYTES + 100))
    for name in "abc":
        kept.keep(name, job(100))
    assert kept.find("a") is not None
    kept.keep("d", job(100))
    assert [name for name in "abcd" if kept.find(name) is not None] == ["a", "c", "d"]
    kept.keep("e", job(10_000))
    assert kept.find("e") is None, "it does not fit at all"
    for name in "acd":
        kept.drop(name)
    assert (len(kept), kept.size_bytes) == (0, 0)


def test_a_tool_is_expected_to_take_no_longer_than_most_of_its_last_runs() -> None:
    times = ToolTimes(10)
    for seconds in (30.0, 20.0):
        times.note("acme", "build", seconds)
    assert times.expected("acme", ["build"]) is None, "two runs tell nothing"
    times.note("acme", "build", 40.0)
    assert times.expected("acme", ["build"]) == 20.0
    assert times.expected("other", ["build"]) is None, "one tenant learns nothing of another"
    for _ in range(40):
        times.note("acme", "build", 60.0)
    assert times.expected("acme", ["build"]) == 60.0
    for _ in range(3):
        times.note("acme", "look", 1.0)
    assert times.expected("acme", ["look", "build"]) == 60.0, "the results come together"


def test_tools_are_bounded_in_number() -> None:
    times = ToolTimes(2)
    for name in "abcab":
        for _ in range(3):
            times.note("t", name, 1.0)
    assert len(times) == 2
    assert times.expected("t", ["c"]) is None


def test_what_is_due_is_taken_once_in_order_of_time() -> None:
    agenda = Agenda(3)
    assert all(agenda.put(name, at) for name, at in (("a", 5.0), ("b", 3.0), ("c", 9.0)))
    assert not agenda.put("d", 1.0), "there is no room"
    assert agenda.put("a", 2.0), "the later word counts"
    assert (agenda.next_at(), agenda.at("a")) == (2.0, 2.0)
    assert agenda.drop("b")
    assert list(agenda.take(6.0)) == ["a"]
    assert list(agenda.take(6.0)) == []
    assert agenda.next_at() == 9.0
    for at in range(1000):
        agenda.put("c", float(at))
    assert list(agenda.take(1e9)) == ["c"]
    assert agenda.next_at() is None


def test_a_prefetch_begins_before_the_request_is_expected_and_not_for_short_waits() -> None:
    assert prefetch_at(100.0, 30.0, lead_s=3.0, shortest_s=10.0) == 127.0
    assert prefetch_at(100.0, 9.0, lead_s=3.0, shortest_s=10.0) is None
    assert prefetch_at(100.0, 1.0, lead_s=3.0, shortest_s=0.0) == 100.0
