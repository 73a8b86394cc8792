"""Codex when something goes wrong, or slowly."""

import pytest

from kvbus_testkit.timing import eventually_sync
from tests.agents.client import Outcome
from tests.agents.clients.codex import ALL, PROVIDER, Codex, shell, turns
from tests.agents.conftest import StartStage
from tests.agents.scenarios import INTERNAL, OVERLOADED
from tests.agents.stage import Stage
from tests.agents.system import Line, line

everywhere = pytest.mark.parametrize("client", ALL, ids=str)
over_http = pytest.mark.parametrize("client", [client for client in ALL if not client.websocket], ids=str)

BUSY = {"error": {"type": "rate_limit_error", "message": "Rate limit reached"}}
OPEN = "kvbus_worker_requests_open"
LISTED = "listed-2"


def tool_loop(stage: Stage, *faults: Line) -> list[Line]:
    """A loop of two turns; the faults come in the middle, before the second turn goes well."""
    look = shell("ls src && echo listed-$((1 + 1))")
    return [
        line("LOOK-AROUND", stage.model.turn("I look.", thought="A list.", calls=[look])),
        *faults,
        line(LISTED, stage.model.turn("One file.", thought="That is all.")),
    ]


def check_reconnected(client: Codex, outcome: Outcome) -> None:
    """It went on after one try more, which it may say."""
    assert outcome.status == 0
    assert all("Reconnecting... 1/5" in row for row in client.complaints(outcome)), outcome


@everywhere
@pytest.mark.parametrize("code", ["overloaded", "internal"])
def test_a_refusal_in_the_middle_is_tried_again(client: Codex, code: str, start_stage: StartStage) -> None:
    stage = start_stage(client)
    error = {"overloaded": OVERLOADED, "internal": INTERNAL}[code]
    status = {"overloaded": 503, "internal": 500}[code]
    stage.play(*tool_loop(stage, line(LISTED, error=error, once=True)))
    outcome = stage.ask("LOOK-AROUND")
    assert client.answer(outcome) == "One file.", stage.summary()
    assert client.complaints(outcome) == []
    first, refused, again = turns(stage.generations)
    told = refused.events[-1]["status"] if client.websocket else refused.status
    assert told == status
    stage.check_turns_cached(exchanges=[first, again])


@over_http
def test_a_busy_gateway_that_says_when_to_come_back_is_tried_again(client: Codex, start_stage: StartStage) -> None:
    stage = start_stage(client)
    stage.play(*tool_loop(stage))
    stage.recorder.refuse_next(429, BUSY, {"retry-after": "1"})
    outcome = stage.ask("LOOK-AROUND")
    if client.version == "0.116.0":
        check_given_up(client, outcome)
    else:
        assert client.answer(outcome) == "One file.", stage.summary()
        check_reconnected(client, outcome)
        assert [exchange.status for exchange in stage.generations] == [429, 200, 200]


@over_http
def test_a_busy_gateway_that_does_not_say_when_to_come_back_ends_the_turn(
    client: Codex, start_stage: StartStage
) -> None:
    stage = start_stage(client)
    stage.recorder.refuse_next(429, BUSY)
    check_given_up(client, stage.ask("LOOK-AROUND"))
    assert [exchange.status for exchange in stage.generations] == [429]


def check_given_up(client: Codex, outcome: Outcome) -> None:
    assert outcome.status == 1
    assert "exceeded retry limit, last status: 429" in client.complaints(outcome)[-1]


@everywhere
def test_an_engine_that_fails_in_mid_answer_is_asked_again(client: Codex, start_stage: StartStage) -> None:
    stage = start_stage(client)
    half = stage.model.turn("There is one f", thought="That is all.")
    stage.play(*tool_loop(stage, line(LISTED, half, error=INTERNAL, once=True)))
    outcome = stage.ask("LOOK-AROUND")
    assert client.answer(outcome) == "One file.", stage.summary()
    check_reconnected(client, outcome)
    first, failed, again = turns(stage.generations)
    assert failed.events[-1]["type"] == "response.failed"
    assert failed.events[-1]["response"]["error"] == {"code": "server_error", "message": "the engine broke"}
    stage.check_turns_cached(exchanges=[first, again])


@everywhere
def test_a_connection_that_breaks_in_mid_answer_is_opened_again(client: Codex, start_stage: StartStage) -> None:
    stage = start_stage(client)
    told = "The tide. " * 40
    stage.play(line("LONG-STORY", stage.model.turn(told, thought="Long."), step_s=0.01))
    stage.recorder.cut_next(30)
    outcome = stage.ask("LONG-STORY")
    assert client.answer(outcome) == told.strip(), stage.summary()
    check_reconnected(client, outcome)
    broken, again = turns(stage.generations)
    assert 0 < len(broken.text) < len(told)
    assert again.text == told
    stage.check_cached(again, 0.97, "tried again")
    eventually_sync(lambda: stage.system.worker_metric(OPEN) == 0, what="the broken request's end")


@everywhere
def test_a_prompt_beyond_the_context_says_so(client: Codex, start_stage: StartStage) -> None:
    stage = start_stage(client, context_length=15_000)
    outcome = stage.ask("LOOK-AROUND")
    assert outcome.status == 1
    said = (
        "maximum context length is 15000" if client.version == "0.116.0" else "ran out of room in the model's context"
    )
    assert said in client.complaints(outcome)[-1]
    assert len(turns(stage.generations)) == 1


@everywhere
def test_a_slow_prefill_is_waited_for(client: Codex, start_stage: StartStage) -> None:
    """The client gives up after silent 300 s, here 2 s: the server breaks the silence much more often."""
    stage = start_stage(client, settings=["frontend.keep_alive_s=0.2"])
    stage.play(*tool_loop(stage, line(LISTED, stage.model.turn("One file.", thought="At last."), prefill_s=6)))
    outcome = stage.ask("LOOK-AROUND", arguments=["-c", f"{PROVIDER}.stream_idle_timeout_ms=2000"])
    stage.check_went_well(outcome, "One file.")
    made = turns(stage.generations)
    assert len(made) == 2
    stage.check_turns_cached(exchanges=made)


@everywhere
@pytest.mark.parametrize("prefill_s", [0, 600])
def test_a_cancelled_turn_frees_the_request(client: Codex, prefill_s: int, start_stage: StartStage) -> None:
    stage = start_stage(client)
    story = stage.model.turn("The tide. " * 3000, thought="Long.")
    stage.play(
        line("LONG-STORY", story, prefill_s=prefill_s, step_s=0.05),
        line("GO-ON-THEN", stage.model.turn("It came in.", thought="Short.")),
    )
    running = stage.start("LONG-STORY")
    stage.recorder.wait_for(lambda made: any(exchange.events for exchange in turns(made)), "a request under way")
    if not prefill_s:
        stage.recorder.wait_for(lambda made: "The tide" in turns(made)[0].text, "an answer under way")
    assert stage.system.worker_metric(OPEN) == 1
    running.interrupt()
    running.wait()
    eventually_sync(lambda: stage.system.worker_metric(OPEN) == 0, what="the request's end")
    stage.check_went_well(stage.ask("GO-ON-THEN", resume=True), "It came in.")
