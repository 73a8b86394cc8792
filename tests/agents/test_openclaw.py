"""OpenClaw against kvbus. It takes long to start, so that each run goes through much.

It puts a message of its own into each request that is gone from the next one: behind all others over Chat and Messages, behind what
the user wrote last over Responses. What can be found in the cache ends there. Sub-agents need its gateway.
"""

import pytest

from tests.agents.clients.openclaw import ALL, OpenClaw
from tests.agents.conftest import StartStage
from tests.agents.model_formats import Call
from tests.agents.scenarios import thoughts_of
from tests.agents.stage import Stage
from tests.agents.system import line

pytestmark = pytest.mark.parametrize("client", ALL, ids=str)


def go_through_tools(client: OpenClaw, stage: Stage) -> None:
    """One user turn: a file, three calls at once, and a tool that has to be searched for."""
    turn = stage.model.turn
    file = stage.project / "notes.txt"
    write = client.write(file, "High water at noon.\n")
    three = [
        client.shell("wc -c < notes.txt && echo counted-$((20 + 1))"),
        client.shell("echo second-$((20 + 2))"),
        client.read(stage.project / "src" / "tides.py"),
    ]
    search = Call("tool_search", {"query": "list agents", "limit": 1})
    describe = Call("tool_describe", {"id": "agents_list"})
    found = Call("tool_call", {"id": "agents_list", "args": {}})
    stage.play(
        line("WRITE-IT", turn("I write.", thought="A file.", calls=[write])),
        line("Successfully wrote 20 bytes", turn("Three more.", thought="Independent.", calls=three)),
        line("return hour + 12.42", turn(thought="A tool is missing.", calls=[search])),
        line('"name": "agents_list"', turn(thought="How is it called?", calls=[describe])),
        line('"outputSchema"', turn(thought="Call it.", calls=[found])),
        line('"requester": "main"', turn("All of it is done.", thought="That was the last one.")),
    )
    stage.check_went_well(stage.ask("Please WRITE-IT and so on."), "All of it is done.")
    assert file.read_text() == "High water at noon.\n"
    assert [exchange.calls for exchange in stage.generations] == [
        ["write"],
        ["exec", "exec", "read"],
        ["tool_search"],
        ["tool_describe"],
        ["tool_call"],
        [],
    ]
    last = stage.generations[-1]
    assert last.in_prompt("20\ncounted-21")
    assert last.in_prompt("second-22")
    thoughts = thoughts_of(last)
    texts = ["A file.", "Independent.", "A tool is missing.", "How is it called?", "Call it."]
    assert [thought.text.strip() for thought in thoughts] == texts
    assert client.api == "chat" or all(thought.token for thought in thoughts)
    # The longest result, a description of a tool, is a good part of what is new.
    stage.check_turns_cached(0.93)


def test_a_tool_loop_keeps_its_prefix_in_another_model_format(client: OpenClaw, start_stage: StartStage) -> None:
    go_through_tools(client, start_stage(client, "hermes"))


def test_the_next_turn_and_the_next_session_find_what_a_tool_loop_left(
    client: OpenClaw, start_stage: StartStage
) -> None:
    stage = start_stage(client)
    turn = stage.model.turn
    go_through_tools(client, stage)
    stage.play(
        line("AND-NOW", turn("Nothing is left.", thought="It was all done.")),
        line("ASK-ABOUT-EBB", turn("It falls.", thought="Easy.")),
    )
    stage.check_went_well(stage.ask("AND-NOW?", resume=True), "Nothing is left.")
    stage.check_went_well(stage.ask("ASK-ABOUT-EBB"), "It falls.")
    *loop, next_turn, next_session = stage.generations
    assert next_turn.in_prompt("WRITE-IT")
    assert not next_session.in_prompt("WRITE-IT")
    kept = loop[-1].usage
    found = next_turn.usage
    assert kept is not None
    assert found is not None
    assert found.cached_tokens >= 0.97 * kept.prompt_tokens, stage.summary()
    stage.check_cached(next_session, 0.97, "next session")
