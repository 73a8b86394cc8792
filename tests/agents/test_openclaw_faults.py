"""OpenClaw when something goes wrong, or slowly. It takes long to start, so that each run goes through much."""

import pytest

from tests.agents import scenarios
from tests.agents.clients.openclaw import ALL, OpenClaw
from tests.agents.conftest import StartStage
from tests.agents.model_formats import CONTEXT_LENGTH
from tests.agents.scenarios import INTERNAL, LISTED, OVERLOADED
from tests.agents.system import line

pytestmark = pytest.mark.parametrize("client", ALL, ids=str)


def test_whatever_fails_on_the_way_is_tried_again_and_slowness_is_waited_for(
    client: OpenClaw, start_stage: StartStage
) -> None:
    stage = start_stage(client, settings=["frontend.keep_alive_s=0.1"])
    turn = stage.model.turn
    look = client.shell("ls src && echo listed-it")
    stage.play(
        line("LOOK-AROUND", turn("I look.", thought="A list.", calls=[look]), step_s=0.02),
        line(LISTED, error=OVERLOADED, once=True),
        line(LISTED, error=INTERNAL, once=True),
        line(LISTED, turn("There is one f", thought="That is all."), error=INTERNAL, once=True),
        line(LISTED, turn("One file.", thought="At last."), prefill_s=4),
    )
    stage.recorder.cut_next(8)
    body = {"type": "error", "error": {"type": "rate_limit_error", "message": "Rate limit reached"}}
    stage.recorder.refuse_next(429, body, {"retry-after": "1"})
    outcome = stage.ask("LOOK-AROUND")
    assert outcome.status == 0, f"{outcome} {stage.summary()}"
    assert "One file." in client.answer(outcome)
    # The one that was cut, a refusal by the gateway, the call, three faults of the server, the answer.
    assert len(stage.generations) == 7, stage.summary()
    assert stage.generations[0].disconnected or not stage.generations[0].calls
    first, last = stage.generations[2], stage.generations[-1]
    assert first.usage is not None
    assert last.usage is not None
    assert last.usage.cached_tokens >= 0.97 * first.usage.prompt_tokens
    assert last.response.count(b"\n\n") > 20


def test_a_prompt_that_cannot_fit_is_said_to_be_too_long(client: OpenClaw, start_stage: StartStage) -> None:
    stage = start_stage(client, context_length=40_000)
    stage.play(line("LOOK-AROUND", stage.model.turn("One file.")))
    outcome = stage.ask("LOOK-AROUND")
    assert outcome.status == 1
    assert "Context overflow" in outcome.stdout
    assert {exchange.status for exchange in stage.generations_of("LOOK-AROUND")} == {400}


def test_a_session_that_outgrows_the_context_is_compacted(client: OpenClaw, start_stage: StartStage) -> None:
    # Room for the prompt of 50 K and an answer of 10 K, but not for a question of 6 K behind them.
    stage = start_stage(client, context_length=64_000)
    # The client believes in more: it finds out by the refusal.
    client.change_model(stage.site, {"contextWindow": CONTEXT_LENGTH, "maxTokens": 12_000})
    compaction = {"mode": "default", "keepRecentTokens": 500}
    client.change_settings(stage.site, {"agents": {"defaults": {"compaction": compaction}}})
    turn = stage.model.turn
    stage.play(
        line(["GO-ON-THEN", "context summarization assistant"], turn("We spoke of tides.", thought="Sum up.")),
        line("TELL-ME-OF-TIDES", turn("They come and go. " * 550, thought="Long story.")),
        line("GO-ON-THEN", turn("They still do.", thought="Next.")),
    )
    stage.check_went_well(stage.ask("TELL-ME-OF-TIDES"), "They come and go.")
    outcome = stage.ask("GO-ON-THEN " + "and on " * 900, resume=True)
    assert outcome.status == 0, f"{outcome} {stage.summary()}"
    assert "They still do." in client.answer(outcome)
    assert [exchange.status for exchange in stage.generations] == [200, 400, 200, 200]
    after = stage.generations[-1]
    assert after.in_prompt("We spoke of tides.")
    assert not after.in_prompt("They come and go.")
    stage.check_cached(after, 0.8, "after compaction")


def test_a_cancelled_turn_frees_the_request(client: OpenClaw, start_stage: StartStage) -> None:
    scenarios.a_cancelled_turn_is_freed(client, start_stage(client), 0)
