"""opencode against kvbus."""

import msgspec
import pytest

from tests.agents import scenarios
from tests.agents.clients.opencode import ALL, OpenCode
from tests.agents.conftest import StartStage
from tests.agents.model_formats import Call
from tests.agents.system import line

pytestmark = pytest.mark.parametrize("client", ALL, ids=str)


@pytest.mark.parametrize("model_format", ["xml", "hermes"])
def test_a_tool_loop_writes_a_file_and_runs_a_command(
    client: OpenCode, model_format: str, start_stage: StartStage
) -> None:
    scenarios.a_note_is_written_and_counted(client, start_stage(client, model_format))


def test_parallel_calls_and_the_thoughts_before_them_come_back_whole(client: OpenCode, start_stage: StartStage) -> None:
    scenarios.calls_are_made_at_once(client, start_stage(client))


def test_the_next_user_turn_continues_the_session(client: OpenCode, start_stage: StartStage) -> None:
    scenarios.the_next_turn_continues_the_session(client, start_stage(client))


def test_a_second_session_in_the_same_folder_finds_the_first_ones_prompt(
    client: OpenCode, start_stage: StartStage
) -> None:
    scenarios.a_second_session_starts_from_the_first_ones_prompt(client, start_stage(client))


@pytest.mark.parametrize("code", ["overloaded", "internal"])
def test_a_refusal_in_the_middle_is_tried_again(client: OpenCode, code: str, start_stage: StartStage) -> None:
    scenarios.a_refusal_is_tried_again(client, start_stage(client), code)


def test_a_busy_gateway_is_tried_again(client: OpenCode, start_stage: StartStage) -> None:
    scenarios.a_busy_gateway_is_tried_again(client, start_stage(client))


def test_a_slow_prefill_is_waited_for(client: OpenCode, start_stage: StartStage) -> None:
    scenarios.a_slow_prefill_is_waited_for(client, start_stage(client, settings=["frontend.keep_alive_s=0.1"]))


@pytest.mark.parametrize("prefill_s", [0, 600])
def test_a_cancelled_turn_frees_the_request(client: OpenCode, prefill_s: int, start_stage: StartStage) -> None:
    scenarios.a_cancelled_turn_is_freed(client, start_stage(client), prefill_s)


def test_an_engine_that_fails_in_mid_answer_is_asked_again(client: OpenCode, start_stage: StartStage) -> None:
    scenarios.an_engine_fails_in_mid_answer(client, start_stage(client))


def test_a_connection_that_breaks_in_mid_answer_is_made_again(client: OpenCode, start_stage: StartStage) -> None:
    scenarios.a_connection_breaks_in_mid_answer(client, start_stage(client))


def test_a_prompt_beyond_the_context_says_so(client: OpenCode, start_stage: StartStage) -> None:
    stage = start_stage(client, context_length=20_000)
    # It would compact what is not there, and try again, for ever.
    scenarios.a_prompt_beyond_the_context_says_so(stage, {"OPENCODE_DISABLE_AUTOCOMPACT": "1"})


def test_a_session_that_outgrows_the_context_is_compacted(client: OpenCode, start_stage: StartStage) -> None:
    stage = start_stage(client, context_length=52_000)
    scenarios.a_session_that_outgrows_the_context_is_compacted(stage, "Create a new anchored summary")


def test_a_sub_agent_runs_and_reports(client: OpenCode, start_stage: StartStage) -> None:
    send = Call("task", {"description": "Count", "prompt": "COUNT-THE-FILES", "subagent_type": "general"})
    scenarios.a_sub_agent_runs_and_reports(client, start_stage(client), send)


def test_the_title_of_a_session_is_asked_for_beside_its_first_turn(client: OpenCode, start_stage: StartStage) -> None:
    asking = msgspec.structs.replace(client, asks_for_title=True)
    stage = start_stage(asking)
    stage.play(
        *scenarios.loop(asking, stage),
        line(["You are a title generator", "LOOK-AROUND"], stage.model.turn("Files", thought="Short.")),
    )
    stage.check_went_well(stage.ask("LOOK-AROUND"), "One file.")
    titles = [exchange for exchange in stage.generations if not exchange.json.get("tools")]
    assert [exchange.status for exchange in titles] == [200]
    stage.check_turns_cached(exchanges=stage.generations_of("LOOK-AROUND"))
