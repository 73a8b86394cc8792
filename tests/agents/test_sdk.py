"""Agents written with the vendors' libraries, against kvbus."""

import msgspec
import pytest

from tests.agents import scenarios
from tests.agents.clients.sdk import ALL, STREAMING, Sdk
from tests.agents.conftest import StartStage

everywhere = pytest.mark.parametrize("client", ALL, ids=str)
streaming = pytest.mark.parametrize("client", STREAMING, ids=str)


@everywhere
@pytest.mark.parametrize("model_format", ["xml", "hermes"])
def test_a_tool_loop_writes_a_file_and_runs_a_command(client: Sdk, model_format: str, start_stage: StartStage) -> None:
    scenarios.a_note_is_written_and_counted(client, start_stage(client, model_format))


@everywhere
def test_parallel_calls_and_the_thoughts_before_them_come_back_whole(client: Sdk, start_stage: StartStage) -> None:
    scenarios.calls_are_made_at_once(client, start_stage(client))


@everywhere
def test_the_next_user_turn_continues_the_session(client: Sdk, start_stage: StartStage) -> None:
    scenarios.the_next_turn_continues_the_session(client, start_stage(client))


@everywhere
def test_a_second_session_finds_the_first_ones_prompt(client: Sdk, start_stage: StartStage) -> None:
    scenarios.a_second_session_starts_from_the_first_ones_prompt(client, start_stage(client))


@streaming
@pytest.mark.parametrize("code", ["overloaded", "internal"])
def test_a_refusal_in_the_middle_is_tried_again(client: Sdk, code: str, start_stage: StartStage) -> None:
    scenarios.a_refusal_is_tried_again(client, start_stage(client), code)


@streaming
def test_a_busy_gateway_is_tried_again(client: Sdk, start_stage: StartStage) -> None:
    scenarios.a_busy_gateway_is_tried_again(client, start_stage(client))


@streaming
def test_a_slow_prefill_is_waited_for(client: Sdk, start_stage: StartStage) -> None:
    impatient = msgspec.structs.replace(client, timeout_s=2.0)
    scenarios.a_slow_prefill_is_waited_for(impatient, start_stage(impatient, settings=["frontend.keep_alive_s=0.1"]))


@streaming
@pytest.mark.parametrize("prefill_s", [0, 600])
def test_a_cancelled_turn_frees_the_request(client: Sdk, prefill_s: int, start_stage: StartStage) -> None:
    scenarios.a_cancelled_turn_is_freed(client, start_stage(client), prefill_s)
