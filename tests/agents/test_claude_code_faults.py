"""Claude Code when something goes wrong, or slowly."""

import re

import pytest

from kvbus_testkit.timing import eventually_sync
from tests.agents.clients.claude_code import ALL, ClaudeCode
from tests.agents.conftest import StartStage
from tests.agents.model_formats import CONTEXT_LENGTH
from tests.agents.scenarios import INTERNAL, LISTED, OVERLOADED, loop
from tests.agents.system import line

pytestmark = pytest.mark.parametrize("client", ALL, ids=str)

OPEN = "kvbus_worker_requests_open"
OLDER = ("2.1.197", "2.1.140")
"""Versions that compact by themselves only on what they count, and that give up when an answer breaks off."""


@pytest.mark.parametrize("code", ["overloaded", "internal"])
def test_a_refusal_in_the_middle_is_tried_again(client: ClaudeCode, code: str, start_stage: StartStage) -> None:
    stage = start_stage(client)
    error = {"overloaded": OVERLOADED, "internal": INTERNAL}[code]
    stage.play(*loop(client, stage, line(LISTED, error=error, once=True)))
    outcome = stage.ask("LOOK-AROUND")
    assert client.answer(outcome) == "One file.", stage.summary()
    assert client.complaints(outcome) == []
    status = {"overloaded": 529, "internal": 500}[code]
    assert [exchange.status for exchange in stage.generations] == [200, status, 200]
    first, refused, again = stage.generations
    if code == "overloaded":
        assert refused.response_headers["retry-after"] == "1"
    assert again.json["messages"] == refused.json["messages"]
    stage.check_turns_cached(exchanges=[first, again])


@pytest.mark.parametrize(("status", "kind"), [(429, "rate_limit_error"), (529, "overloaded_error")])
def test_a_busy_gateway_is_tried_again(client: ClaudeCode, status: int, kind: str, start_stage: StartStage) -> None:
    stage = start_stage(client)
    stage.play(*loop(client, stage))
    body = {"type": "error", "error": {"type": kind, "message": "busy"}}
    stage.recorder.refuse_next(status, body, {"retry-after": "1"})
    outcome = stage.ask("LOOK-AROUND")
    assert client.answer(outcome) == "One file.", stage.summary()
    assert client.complaints(outcome) == []
    assert [exchange.status for exchange in stage.generations] == [status, 200, 200]


def test_an_engine_that_fails_in_mid_answer_is_told_of_and_asked_to_go_on(
    client: ClaudeCode, start_stage: StartStage
) -> None:
    stage = start_stage(client)
    half = stage.model.turn("There is one f", thought="That is all.")
    stage.play(
        *loop(client, stage, line(LISTED, half, error=INTERNAL, once=True)),
        line("cut off mid-stream", stage.model.turn("ile.", thought="Go on.")),
    )
    outcome = stage.ask("LOOK-AROUND")
    assert stage.generations[1].events[-1]["error"]["message"] == "Internal server error: the engine broke"
    if client.version in OLDER:
        assert (outcome.status, client.answer(outcome)) == (1, "API Error: Internal server error: the engine broke")
        outcome = stage.ask("cut off mid-stream", resume=True)
    assert outcome.status == 0, stage.summary()
    assert client.complaints(outcome) == []
    assert all(exchange.status == 200 for exchange in stage.generations)
    assert len(stage.generations) == 3
    stage.check_turns_cached()


def test_a_connection_that_breaks_in_mid_answer_is_no_loss(client: ClaudeCode, start_stage: StartStage) -> None:
    stage = start_stage(client)
    stage.play(
        line("LONG-STORY", stage.model.turn("The tide. " * 300, thought="Long."), step_s=0.005),
        line("cut off mid-stream", stage.model.turn("The end.", thought="Go on.")),
    )
    stage.recorder.cut_next(200)
    outcome = stage.ask("LONG-STORY")
    if client.version in OLDER:
        assert (outcome.status, client.answer(outcome)[:10]) == (1, "API Error:")
        outcome = stage.ask("cut off mid-stream", resume=True)
    assert outcome.status == 0, stage.summary()
    assert client.complaints(outcome) == []
    assert [exchange.status for exchange in stage.generations] == [200, 200]
    eventually_sync(lambda: stage.system.worker_metric(OPEN) == 0, what="the end of both requests")
    stage.check_cached(stage.generations[-1], 0.97, "after the cut")


def test_a_prompt_that_cannot_fit_is_refused_with_both_lengths(client: ClaudeCode, start_stage: StartStage) -> None:
    stage = start_stage(client, context_length=40_000)
    stage.play(line("LOOK-AROUND", stage.model.turn("One file.")))
    outcome = stage.ask("LOOK-AROUND")
    assert outcome.status == 1
    assert "Prompt is too long" in client.answer(outcome)
    assert [exchange.status for exchange in stage.generations] == [400]
    message = stage.generations[0].events[0]["error"]["message"]
    assert re.fullmatch(r"prompt is too long: \d+ tokens > 40000 maximum", message)


def test_a_session_that_outgrows_the_context_is_compacted(client: ClaudeCode, start_stage: StartStage) -> None:
    probe = start_stage(client)
    probe.play(line("HOW-LONG", probe.model.turn("Long enough.")))
    probe.ask("HOW-LONG is it?")
    usage = probe.generations[0].usage
    assert usage is not None
    # What the server can hold:  prompt, answer of 20 K and a request for a summary of 6.5 K, but no question of 9 K in its place.
    stage = start_stage(client, context_length=usage.prompt_tokens + 28_000)
    turn = stage.model.turn
    stage.play(
        line("TELL-ME-OF-TIDES", turn("They come and go. " * 1100, thought="Long story.")),
        line("create a detailed summary", turn("<summary>We spoke of tides.</summary>", thought="Sum up.")),
        line("GO-ON-THEN", turn("They still do.", thought="Next.")),
    )
    stage.check_went_well(stage.ask("TELL-ME-OF-TIDES"), "They come and go.")
    # The client does not know: it finds out by the refusal.
    unaware = {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT_LENGTH)}
    outcome = stage.ask("GO-ON-THEN " + "and on " * 1300, resume=True, environment=unaware)
    if client.version in OLDER:
        assert (outcome.status, client.answer(outcome)) == (1, "Prompt is too long")
        return
    assert outcome.status == 0, f"{outcome} {stage.summary()}"
    assert client.answer(outcome) == "They still do."
    assert client.complaints(outcome) == []
    assert [exchange.status for exchange in stage.generations] == [200, 400, 200, 200]
    compaction, after = stage.generations[2:]
    assert after.in_prompt("We spoke of tides.")
    stage.check_cached(compaction, 0.88, "compaction")


def test_an_answer_that_reaches_the_limit_is_continued(client: ClaudeCode, start_stage: StartStage) -> None:
    stage = start_stage(client)
    stage.play(
        line("LONG-STORY", stage.model.turn("The tide ", thought="Long."), finish="length"),
        line("Output token limit hit", stage.model.turn("comes in.", thought="Go on.")),
    )
    # Without a limit of its own the client has a default, and a larger one for what did not fit.
    outcome = stage.ask("LONG-STORY", environment={"CLAUDE_CODE_MAX_OUTPUT_TOKENS": ""})
    stage.check_went_well(outcome, "comes in.")
    first, last = (exchange.json["max_tokens"] for exchange in stage.generations)
    assert (first, last) == (32_000, 32_000 if client.version in OLDER else 128_000)
    stage.check_turns_cached()


def test_a_slow_prefill_is_waited_for(client: ClaudeCode, start_stage: StartStage) -> None:
    """It gives up after 300 silent seconds. With the server's 10 s between two signs of life a prefill of 6 minutes has 36; the
    times are compressed here, their number is not."""
    stage = start_stage(client, settings=["frontend.keep_alive_s=0.2"])
    stage.play(*loop(client, stage, line(LISTED, stage.model.turn("One file.", thought="At last."), prefill_s=9)))
    stage.check_went_well(stage.ask("LOOK-AROUND"), "One file.")
    assert len(stage.generations) == 2
    assert [event["type"] for event in stage.generations[1].events].count("ping") >= 36
    stage.check_turns_cached()


@pytest.mark.parametrize("prefill_s", [0, 600])
def test_a_cancelled_turn_frees_the_request(client: ClaudeCode, prefill_s: int, start_stage: StartStage) -> None:
    stage = start_stage(client)
    story = stage.model.turn("The tide. " * 3000, thought="Long.")
    stage.play(
        line("LONG-STORY", story, prefill_s=prefill_s, step_s=0.05),
        line("GO-ON-THEN", stage.model.turn("It came in.", thought="Short.")),
    )
    running = stage.start("LONG-STORY")
    stage.recorder.wait_for(lambda made: bool(made) and bool(made[0].status), "a request under way")
    if not prefill_s:
        stage.recorder.wait_for(lambda made: "The tide" in made[0].text, "an answer under way")
    assert stage.system.worker_metric(OPEN) == 1
    running.interrupt()
    running.wait()
    eventually_sync(lambda: stage.system.worker_metric(OPEN) == 0, what="the request's end")
    assert stage.generations[0].disconnected
    stage.check_went_well(stage.ask("GO-ON-THEN", resume=True), "It came in.")
