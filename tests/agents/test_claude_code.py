"""Claude Code against kvbus."""

import pytest

from tests.agents import scenarios
from tests.agents.clients.claude_code import ALL, ClaudeCode
from tests.agents.conftest import StartStage
from tests.agents.model_formats import Call
from tests.agents.system import line

pytestmark = pytest.mark.parametrize("client", ALL, ids=str)


@pytest.mark.parametrize("model_format", ["xml", "hermes"])
def test_a_tool_loop_writes_a_file_and_runs_a_command(
    client: ClaudeCode, model_format: str, start_stage: StartStage
) -> None:
    scenarios.a_note_is_written_and_counted(client, start_stage(client, model_format))


def test_parallel_calls_and_the_thoughts_around_them_come_back_whole(
    client: ClaudeCode, start_stage: StartStage
) -> None:
    stage = start_stage(client)
    scenarios.calls_are_made_at_once(client, stage)
    (thought,) = scenarios.thoughts_of(stage.generations[-1])
    assert thought.text == "They do not depend on each other."


@pytest.mark.parametrize("model_format", ["xml", "hermes"])
def test_the_next_user_turn_continues_the_session(
    client: ClaudeCode, model_format: str, start_stage: StartStage
) -> None:
    scenarios.the_next_turn_continues_the_session(client, start_stage(client, model_format))


@pytest.mark.parametrize("model_format", ["xml", "hermes"])
def test_a_second_session_in_the_same_folder_finds_the_first_ones_prompt(
    client: ClaudeCode, model_format: str, start_stage: StartStage
) -> None:
    scenarios.a_second_session_starts_from_the_first_ones_prompt(client, start_stage(client, model_format))


def test_a_tool_that_is_searched_for_shows_where_it_was_found(client: ClaudeCode, start_stage: StartStage) -> None:
    stage = start_stage(client)
    turn = stage.model.turn
    search = Call("ToolSearch", {"query": "select:CronList"})
    stage.play(
        line("tool_use_error", turn("There is no such tool.", thought="Oh.")),
        line("FIND-A-TOOL", turn("I search.", thought="It is not at hand.", calls=[search])),
        line("<functions>", turn("Found it.", thought="There it is.")),
    )
    # Older versions search with servers that they do not know only when told to.
    stage.check_went_well(stage.ask("Please FIND-A-TOOL.", environment={"ENABLE_TOOL_SEARCH": "true"}), "Found it.")
    first, last = stage.generations
    assert "CronList" not in [tool["name"] for tool in first.json["tools"]]
    assert "CronList" in [tool["name"] for tool in last.json["tools"] if tool.get("defer_loading")]
    stage.check_turns_cached()


def test_a_sub_agent_runs_and_reports(client: ClaudeCode, start_stage: StartStage) -> None:
    errand = {"description": "Count", "prompt": "COUNT-THE-FILES please", "subagent_type": "general-purpose"}
    stage = start_stage(client)
    scenarios.a_sub_agent_runs_and_reports(client, stage, Call("Agent", errand), "working in the background")


def test_compaction_keeps_the_prefix_and_the_session_goes_on(client: ClaudeCode, start_stage: StartStage) -> None:
    stage = start_stage(client)
    turn = stage.model.turn
    stage.play(
        line("TELL-ME-OF-TIDES", turn("They come and go. " * 200, thought="Long story.")),
        line("AND-THE-WIND", turn("It blows.", thought="Short.")),
        line("create a detailed summary", turn("<summary>We spoke of tides.</summary>", thought="Sum up.")),
        line("GO-ON-THEN", turn("They still do.", thought="Next.")),
    )
    stage.check_went_well(stage.ask("TELL-ME-OF-TIDES"), "They come and go.")
    stage.check_went_well(stage.ask("AND-THE-WIND", resume=True), "It blows.")  # one answer is too little to compact
    stage.check_went_well(stage.ask("/compact", resume=True), "")
    stage.check_went_well(stage.ask("GO-ON-THEN", resume=True), "They still do.")
    _, told, compaction, after = stage.generations
    assert after.in_prompt("We spoke of tides.")
    assert not after.in_prompt("They come and go.")
    # The instructions for the summary are new.
    stage.check_cached(compaction, 0.88, "compaction", before=told)
    stage.check_cached(after, 0.6, "after compaction")


def test_an_answer_in_a_given_form_is_asked_for_by_a_tool(client: ClaudeCode, start_stage: StartStage) -> None:
    stage = start_stage(client)
    turn = stage.model.turn
    schema = '{"type": "object", "properties": {"height": {"type": "number"}}, "required": ["height"]}'
    stage.play(
        line("HOW-HIGH", turn(thought="In metres.", calls=[Call("StructuredOutput", {"height": 3.5})])),
        line("Structured output provided successfully", turn("Given.", thought="Done.")),
    )
    outcome = stage.ask("HOW-HIGH is it?", arguments=["--json-schema", schema, "--output-format", "json"])
    stage.check_went_well(outcome, '"structured_output":{"height":3.5}')


def test_in_the_terminal_the_title_of_a_session_comes_beside_its_first_turn(
    client: ClaudeCode, start_stage: StartStage
) -> None:
    stage = start_stage(client)
    turn = stage.model.turn
    stage.play(
        line(["title", "WHEN-IS-HIGH-WATER"], turn('{"title": "High water"}', thought="Short.")),
        line("WHEN-IS-HIGH-WATER", turn("It is at noon, they say.", thought="Look it up.")),
    )
    # The title is asked for only where the client may ask for what is not essential.
    with stage.terminal(client.terminal_command(), {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": ""}) as terminal:
        terminal.wait_for("bypass permissions on")
        terminal.press("WHEN-IS-HIGH-WATER today?")
        terminal.wait_for("WHEN-IS-HIGH-WATER today?")
        terminal.press("\r")
        stage.recorder.wait_for(lambda made: len(made) >= 2 and all(e.over for e in made), "a title and an answer")
    titles = [e for e in stage.generations if "format" in e.json.get("output_config", {})]
    assert [(e.status, e.json["output_config"]["format"]["type"]) for e in titles] == [(200, "json_schema")]
    assert titles[0].text == '{"title": "High water"}'
    assert [exchange.status for exchange in stage.recorder.exchanges if exchange.status >= 400] == []
