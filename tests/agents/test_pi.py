"""pi against kvbus."""

import pytest

from tests.agents import scenarios
from tests.agents.clients.pi import ALL, Pi
from tests.agents.conftest import StartStage
from tests.agents.system import line

pytestmark = pytest.mark.parametrize("client", ALL, ids=str)


@pytest.mark.parametrize("model_format", ["xml", "hermes"])
def test_a_tool_loop_writes_a_file_and_runs_a_command(client: Pi, model_format: str, start_stage: StartStage) -> None:
    scenarios.a_note_is_written_and_counted(client, start_stage(client, model_format))


def test_parallel_calls_and_the_thoughts_before_them_come_back_whole(client: Pi, start_stage: StartStage) -> None:
    scenarios.calls_are_made_at_once(client, start_stage(client))


def test_the_next_user_turn_continues_the_session(client: Pi, start_stage: StartStage) -> None:
    scenarios.the_next_turn_continues_the_session(client, start_stage(client))


def test_a_second_session_in_the_same_folder_finds_the_first_ones_prompt(client: Pi, start_stage: StartStage) -> None:
    scenarios.a_second_session_starts_from_the_first_ones_prompt(client, start_stage(client))


@pytest.mark.parametrize("code", ["overloaded", "internal"])
def test_a_refusal_in_the_middle_is_tried_again(client: Pi, code: str, start_stage: StartStage) -> None:
    scenarios.a_refusal_is_tried_again(client, start_stage(client), code)


def test_a_busy_gateway_is_tried_again(client: Pi, start_stage: StartStage) -> None:
    scenarios.a_busy_gateway_is_tried_again(client, start_stage(client))


def test_a_slow_prefill_is_waited_for(client: Pi, start_stage: StartStage) -> None:
    scenarios.a_slow_prefill_is_waited_for(client, start_stage(client, settings=["frontend.keep_alive_s=0.1"]))


@pytest.mark.parametrize("prefill_s", [0, 600])
def test_a_cancelled_turn_frees_the_request(client: Pi, prefill_s: int, start_stage: StartStage) -> None:
    scenarios.a_cancelled_turn_is_freed(client, start_stage(client), prefill_s)


def test_an_engine_that_fails_in_mid_answer_is_asked_again(client: Pi, start_stage: StartStage) -> None:
    scenarios.an_engine_fails_in_mid_answer(client, start_stage(client))


def test_a_connection_that_breaks_in_mid_answer_is_made_again(client: Pi, start_stage: StartStage) -> None:
    scenarios.a_connection_breaks_in_mid_answer(client, start_stage(client))


def test_a_prompt_beyond_the_context_is_compacted_and_given_up(client: Pi, start_stage: StartStage) -> None:
    stage = start_stage(client, context_length=20_000)
    stage.play(line("will use to continue the work", stage.model.turn("Nothing was said.", thought="Short.")))
    outcome = stage.ask("LOOK-AROUND")
    assert client.answer(outcome) == ""
    assert [exchange.status for exchange in stage.generations] == [400, 200, 400]


def test_a_session_that_outgrows_the_context_is_compacted(client: Pi, start_stage: StartStage) -> None:
    """It keeps the newest answer, and sums up what that one answered and what was before, in two requests at once."""
    stage = start_stage(client, context_length=52_000)
    turn = stage.model.turn
    stage.play(
        line("TELL-ME-OF-TIDES", turn("They come and go. " * 350, thought="Long story.")),
        line("AND-HOW-OFTEN", turn("Twice in a day. " * 400, thought="Again.")),
        line("will use to continue the work", turn("We spoke of tides.", thought="Sum up.")),
        line("understand the kept suffix", turn("He asked how often.", thought="Sum up.")),
        line("GO-ON-THEN", turn("They still do.", thought="Next.")),
    )
    stage.check_went_well(stage.ask("TELL-ME-OF-TIDES"), "They come and go.")
    stage.check_went_well(stage.ask("AND-HOW-OFTEN?", resume=True), "Twice in a day.")
    stage.check_went_well(stage.ask("GO-ON-THEN", resume=True), "They still do.")
    last = stage.generations_of("GO-ON-THEN")[-1]
    assert last.in_prompt("We spoke of tides.")
    assert last.in_prompt("He asked how often.")
    assert not last.in_prompt("They come and go. They come and go.")
    stage.check_cached(last, 0.7, "after compaction")
