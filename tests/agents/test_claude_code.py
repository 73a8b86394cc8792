"""Claude Code against kvbus."""

import pytest

from tests.agents.clients.claude_code import ALL, ClaudeCode
from tests.agents.conftest import StartStage
from tests.agents.model_formats import Call
from tests.agents.system import line

pytestmark = pytest.mark.parametrize("client", ALL, ids=str)

BLOCK_SIZE = 16


@pytest.mark.parametrize("model_format", ["xml", "hermes"])
def test_a_tool_loop_writes_a_file_and_runs_a_command(
    client: ClaudeCode, model_format: str, start_stage: StartStage
) -> None:
    stage = start_stage(client, model_format)
    turn = stage.model.turn
    file = stage.project / "notes.txt"
    write = Call("Write", {"file_path": str(file), "content": "High water at noon.\n"})
    count = Call("Bash", {"command": "wc -c < notes.txt && echo counted-it", "description": "Count"})
    stage.play(
        line("WRITE-THE-NOTE", turn("I will write it.", thought="A file is wanted.", calls=[write])),
        line("notes.txt", turn(thought="Now I count.", calls=[count])),
        line("counted-it\n", turn("It has 20 characters.", thought="Done.")),
    )
    outcome = stage.ask("Please WRITE-THE-NOTE and count it.")
    stage.check_went_well(outcome, "It has 20 characters.")
    assert file.read_text() == "High water at noon.\n"
    assert [exchange.calls for exchange in stage.generations] == [["Write"], ["Bash"], []]
    assert stage.generations[-1].in_prompt("20\ncounted-it")
    stage.check_turns_cached()


def test_parallel_calls_and_the_thoughts_around_them_come_back_whole(
    client: ClaudeCode, start_stage: StartStage
) -> None:
    stage = start_stage(client)
    turn = stage.model.turn
    calls = [
        Call("Bash", {"command": "echo first-$((20 + 1))", "description": "One"}),
        Call("Bash", {"command": "echo second-$((20 + 2))", "description": "Two"}),
        Call("Read", {"file_path": str(stage.project / "README.md")}),
    ]
    stage.play(
        line("DO-ALL-THREE", turn("All at once.", thought="They do not depend on each other.", calls=calls)),
        line("Keeps a log of the tides", turn("All three are done.", thought="Everything came back.")),
    )
    outcome = stage.ask("Please DO-ALL-THREE.")
    stage.check_went_well(outcome, "All three are done.")
    first, last = stage.generations
    assert first.calls == ["Bash", "Bash", "Read"]
    assert last.in_prompt("first-21")
    assert last.in_prompt("second-22")
    assistant = next(message for message in last.json["messages"] if message["role"] == "assistant")
    thought = assistant["content"][0]
    assert (thought["type"], thought["thinking"]) == ("thinking", "They do not depend on each other.")
    assert thought["signature"]
    stage.check_turns_cached()


@pytest.mark.parametrize("model_format", ["xml", "hermes"])
def test_the_next_user_turn_continues_the_session(
    client: ClaudeCode, model_format: str, start_stage: StartStage
) -> None:
    stage = start_stage(client, model_format)
    turn = stage.model.turn
    look = Call("Bash", {"command": "ls src && echo listed-it", "description": "List"})
    stage.play(
        line("LOOK-AROUND", turn("I look.", thought="First a list.", calls=[look])),
        line("listed-it\n", turn("One file.", thought="That is all.")),
        line("AND-NOW", turn("Still one file.", thought="Nothing new.")),
    )
    stage.check_went_well(stage.ask("Please LOOK-AROUND."), "One file.")
    stage.check_went_well(stage.ask("AND-NOW?", resume=True), "Still one file.")
    assert stage.generations[-1].in_prompt("LOOK-AROUND")
    stage.check_turns_cached()


@pytest.mark.parametrize("model_format", ["xml", "hermes"])
def test_a_second_session_in_the_same_folder_finds_the_first_ones_prompt(
    client: ClaudeCode, model_format: str, start_stage: StartStage
) -> None:
    stage = start_stage(client, model_format)
    turn = stage.model.turn
    stage.play(
        line("ASK-ABOUT-EBB", turn("It falls.", thought="Easy.")),
        line("ASK-ABOUT-FLOOD", turn("It rises.", thought="Easy, too.")),
    )
    stage.check_went_well(stage.ask("ASK-ABOUT-EBB"), "It falls.")
    stage.check_went_well(stage.ask("Something else: ASK-ABOUT-FLOOD"), "It rises.")
    assert not stage.generations[-1].in_prompt("ASK-ABOUT-EBB")
    stage.check_cached(stage.generations[-1], 0.75, "second session")


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
    stage = start_stage(client)
    turn = stage.model.turn
    errand = {"description": "Count", "prompt": "COUNT-THE-FILES please", "subagent_type": "general-purpose"}
    count = Call("Bash", {"command": "ls | wc -l && echo agent-counted", "description": "Count"})
    stage.play(
        line("SEND-AN-AGENT", turn("I send one.", thought="Delegate.", calls=[Call("Agent", errand)])),
        line("COUNT-THE-FILES please", turn("Counting.", thought="A command.", calls=[count])),
        line("agent-counted\n", turn("The agent found two.", thought="Two.")),
        line("The agent found two.", turn("There are two.", thought="It came back.")),
        line("working in the background", turn("Waiting for it.", thought="Patience.")),
    )
    stage.check_went_well(stage.ask("Please SEND-AN-AGENT."), "There are two.")
    assert [exchange.calls for exchange in stage.generations if exchange.calls] == [["Agent"], ["Bash"]]
    stage.check_turns_cached(exchanges=[e for e in stage.generations if e.in_prompt("SEND-AN-AGENT")])


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
    assert told.usage is not None
    assert compaction.usage is not None
    assert compaction.usage.cached_tokens >= told.usage.prompt_tokens - 3 * BLOCK_SIZE
    # The instructions for the summary are new.
    stage.check_cached(compaction, 0.88, "compaction")
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
