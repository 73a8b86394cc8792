"""What only the newest Codex is asked for: it searches for tools, asks for titles, and has a mode for local servers."""

import json

import pytest

from tests.agents.clients.codex import NEWEST, Codex, items, shell_until, turns
from tests.agents.conftest import StartStage
from tests.agents.model_formats import Call
from tests.agents.system import line

everywhere = pytest.mark.parametrize("client", NEWEST, ids=str)
over_http = pytest.mark.parametrize("client", [client for client in NEWEST if not client.websocket], ids=str)


@everywhere
@pytest.mark.parametrize("model_format", ["xml", "hermes"])
def test_a_tool_that_is_searched_for_shows_where_it_was_found_and_is_called(
    client: Codex, model_format: str, start_stage: StartStage
) -> None:
    stage = start_stage(client, model_format)
    client.change_catalog(stage.site, {"supports_search_tool": True})
    turn = stage.model.turn
    search = Call("tool_search", {"query": "spawn a sub-agent"})
    spawn = Call("spawn_agent", {"message": "SAY-HELLO"})
    stage.play(
        line("FIND-A-TOOL", turn("I search.", thought="It is not at hand.", calls=[search])),
        line("wait_agent", turn("Found it.", thought="There it is.", calls=[spawn])),
        line("SAY-HELLO", turn("Hello.")),
        line(
            "nickname", turn("A moment.", thought="On its way.", calls=[shell_until("greeted", "may-end-$((1 + 1))")])
        ),
        line("may-end-2", turn("An agent said hello.", thought="It ended.")),
    )
    running = stage.start("Please FIND-A-TOOL.")
    stage.recorder.wait_for(lambda made: any(e.over and e.text == "Hello." for e in made), "an agent's answer")
    (stage.project / "greeted").touch()
    stage.check_went_well(running.wait(), "An agent said hello.")
    first, found, *_ = made = turns(stage.generations)
    assert [exchange.calls for exchange in made if exchange.calls] == [
        ["tool_search_call"],
        ["spawn_agent"],
        ["exec_command"],
    ]
    assert "spawn_agent" not in json.dumps(first.json["tools"])
    assert items(found, "tool_search_output")
    # What was found is half of the second prompt.
    stage.check_cached(found, 0.5, "after the search", before=first)
    stage.check_turns_cached(exchanges=made[1:])


@everywhere
def test_in_the_terminal_the_title_of_a_session_comes_beside_its_first_turn(
    client: Codex, start_stage: StartStage
) -> None:
    stage = start_stage(client)
    turn = stage.model.turn
    stage.play(
        line(["under five words", "WHEN-IS-HIGH-WATER"], turn('{"title": "High water"}', thought="Short.")),
        line("WHEN-IS-HIGH-WATER", turn("It is at noon, they say.", thought="Look it up.")),
    )
    with stage.terminal(client.terminal_command()) as terminal:
        terminal.wait_for("permissions")
        terminal.press("WHEN-IS-HIGH-WATER today?")
        terminal.wait_for("WHEN-IS-HIGH-WATER today?")
        terminal.press("\r")
        terminal.wait_for("It is at noon, they say.")
        terminal.wait_for("High water")
    title = next(exchange for exchange in turns(stage.generations) if exchange.json.get("text"))
    assert title.json["text"]["format"]["type"] == "json_schema"
    assert not title.json.get("tools")
    assert {exchange.status for exchange in stage.generations} == {200}


@over_http
def test_the_mode_for_local_servers_works_without_configuration(client: Codex, start_stage: StartStage) -> None:
    stage = start_stage(client)
    stage.play(line("HOW-ARE-YOU", stage.model.turn("Well.", thought="Polite.")))
    for file in (stage.site.home / ".codex").glob("*"):
        file.unlink()
    outcome = stage.ask(
        "HOW-ARE-YOU?",
        arguments=["--oss", "--local-provider", "lmstudio", "--model", stage.site.model],
        environment={"CODEX_OSS_BASE_URL": f"{stage.site.url}/v1"},
    )
    assert outcome.stdout.strip() == "Well.", f"{outcome}\n{stage.summary()}"
    (complaint,) = client.complaints(outcome)
    assert "Model metadata" in complaint  # that is what the configuration is for
    warming, asked = stage.generations
    assert (warming.json["input"], warming.json["max_output_tokens"], warming.status) == ("", 1, 200)
    assert asked.status == 200
