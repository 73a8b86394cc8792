import pytest

from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.frontend import Delta, Ended, Started, Usage
from kvbus_wire.packing import pack_tokens
from kvbus_worker.core.requests import OpenRequest, RequestTable
from kvbus_worker.engines.base import EngineError


def _request(request_id: str = "r", *, resumed: int = 0, frontend: str = "f") -> OpenRequest:
    return OpenRequest(
        request_id=request_id, frontend_id=frontend, prompt_tokens=10, resumed=resumed, accepted_at=0.0, submitted=True
    )


def _ended(request_id: str = "r", reason: str = "stop") -> Ended:
    return Ended(request_id=request_id, reason=reason, usage=Usage(prompt_tokens=10, output_tokens=1))


def test_a_request_is_known_while_it_runs_and_after_it_ended() -> None:
    table = RequestTable(limit=4, recent_limit=4)
    assert not table.is_known("r", 0)
    table.open(_request())
    assert table.is_known("r", 0)
    table.end(_ended())
    assert table.is_known("r", 0)
    assert not table.is_known("r", 5), "a migrated request that comes back is a new attempt"


def test_open_and_remembered_requests_are_bounded() -> None:
    table = RequestTable(limit=2, recent_limit=3)
    for number in range(5):
        table.open(_request(f"r{number}"))
        table.end(_ended(f"r{number}"))
    assert table.recent == 3
    assert not table.is_known("r1", 0)
    table.open(_request("a"))
    table.open(_request("b"))
    with pytest.raises(EngineError) as caught:
        table.open(_request("c"))
    assert caught.value.reply.code is ErrorCode.OVERLOADED
    assert caught.value.reply.retryable


def test_a_request_ends_once() -> None:
    table = RequestTable(limit=2, recent_limit=2)
    table.open(_request())
    assert table.end(_ended()) is not None
    assert table.end(_ended()) is None


def test_the_verdict_replaces_the_engines_cancelled() -> None:
    table = RequestTable(limit=2, recent_limit=2)
    verdict = ErrorReply(code=ErrorCode.DEADLINE_EXCEEDED, message="late")
    table.open(_request())
    assert table.condemn("r", verdict) is not None
    assert table.condemn("r", None) is None, "the first verdict stands"
    closed = table.end(_ended(reason="cancelled"))
    assert closed is not None
    assert (closed[1].reason, closed[1].error) == ("error", verdict)


def test_an_end_that_was_faster_than_the_verdict_stands() -> None:
    table = RequestTable(limit=2, recent_limit=2)
    table.open(_request())
    table.condemn("r", ErrorReply(code=ErrorCode.DEADLINE_EXCEEDED, message="late"))
    closed = table.end(_ended(reason="stop"))
    assert closed is not None
    assert closed[1].reason == "stop"


def test_the_workers_own_end_has_true_usage() -> None:
    table = RequestTable(limit=2, recent_limit=2)
    request = _request(resumed=2)
    table.open(request)
    table.note_started(Started("r", 8, 4))
    table.note_delta(Delta("r", 2, pack_tokens([1, 2, 3])), 1.0)
    closed = table.end_by_worker(request, ErrorReply(code=ErrorCode.DRAINING, message="bye", retryable=True))
    assert closed is not None
    usage = closed[1].usage
    assert (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens, usage.onboarded_tokens) == (10, 5, 8, 4)


def test_requests_are_found_by_frontend() -> None:
    table = RequestTable(limit=4, recent_limit=2)
    table.open(_request("a", frontend="f1"))
    table.open(_request("b", frontend="f2"))
    assert [request.request_id for request in table.of_frontend("f2")] == ["b"]
    assert table.frontends() == {"f1", "f2"}


def test_the_output_of_each_request_is_told_beside_its_id() -> None:
    table = RequestTable(limit=4, recent_limit=4)
    table.open(_request("a"))
    table.open(_request("b", resumed=3))
    table.note_delta(Delta("b", 3, pack_tokens([7, 8])), 1.0)
    assert dict(zip(table.ids, table.outputs, strict=True)) == {"a": 0, "b": 5}
    table.end(_ended("a"))
    assert (table.ids, table.outputs) == (("b",), (5,))
