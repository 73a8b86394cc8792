"""Codex against kvbus."""

import json
from collections.abc import Sequence

import pytest

from tests.agents.clients.codex import ALL, Codex, items, shell, shell_until, turns
from tests.agents.conftest import StartStage
from tests.agents.exchange import Exchange
from tests.agents.model_formats import Call
from tests.agents.system import line

pytestmark = pytest.mark.parametrize("client", ALL, ids=str)


def outputs(made: Sequence[Exchange]) -> list[str]:
    """What tools answered, as requests bring it."""
    found = [item["output"] for exchange in made for item in items(exchange, "function_call_output")]
    return [output for output in found if isinstance(output, str)]


@pytest.mark.parametrize("model_format", ["xml", "hermes"])
def test_a_tool_loop_writes_a_file_and_runs_a_command(
    client: Codex, model_format: str, start_stage: StartStage
) -> None:
    stage = start_stage(client, model_format)
    turn = stage.model.turn
    file = stage.project / "notes.txt"
    write = shell("printf 'High water at noon.\\n' > notes.txt && echo wrote-$((40 + 2))")
    count = shell("wc -c < notes.txt && echo counted-$((40 + 3))")
    stage.play(
        line("WRITE-THE-NOTE", turn("I will write it.", thought="A file is wanted.", calls=[write])),
        line("wrote-42", turn(thought="Now I count.", calls=[count])),
        line("counted-43", turn("It has 20 characters.", thought="Done.")),
    )
    outcome = stage.ask("Please WRITE-THE-NOTE and count it.")
    stage.check_went_well(outcome, "It has 20 characters.")
    assert file.read_text() == "High water at noon.\n"
    made = turns(stage.generations)
    assert [exchange.calls for exchange in made] == [["exec_command"], ["exec_command"], []]
    assert made[-1].in_prompt("20\ncounted-43")
    stage.check_turns_cached(exchanges=made)
    assert {exchange.method for exchange in made} == {"WS" if client.websocket else "POST"}


def test_parallel_calls_and_the_thoughts_around_them_come_back_whole(client: Codex, start_stage: StartStage) -> None:
    stage = start_stage(client)
    turn = stage.model.turn
    calls = [shell("echo first-$((20 + 1))"), shell("echo second-$((20 + 2))"), shell("cat README.md")]
    stage.play(
        line("DO-ALL-THREE", turn("All at once.", thought="They do not depend on each other.", calls=calls)),
        line("Keeps a log of the tides", turn("All three are done.", thought="Everything came back.")),
    )
    stage.check_went_well(stage.ask("Please DO-ALL-THREE."), "All three are done.")
    first, last = turns(stage.generations)
    assert first.calls == ["exec_command"] * 3
    assert last.in_prompt("first-21")
    assert last.in_prompt("second-22")
    if client.websocket:
        assert last.json["previous_response_id"]
        assert [item["type"] for item in last.json["input"]] == ["function_call_output"] * 3
    else:
        (thought,) = items(last, "reasoning")
        assert thought["summary"][0]["text"] == "They do not depend on each other."
        assert thought["encrypted_content"]
    stage.check_turns_cached(exchanges=[first, last])


@pytest.mark.parametrize("model_format", ["xml", "hermes"])
def test_the_next_user_turn_continues_the_session(client: Codex, model_format: str, start_stage: StartStage) -> None:
    stage = start_stage(client, model_format)
    turn = stage.model.turn
    stage.play(
        line(
            "LOOK-AROUND", turn("I look.", thought="First a list.", calls=[shell("ls src && echo listed-$((1 + 1))")])
        ),
        line("listed-2", turn("One file.", thought="That is all.")),
        line("AND-NOW", turn("Still one file.", thought="Nothing new.")),
    )
    stage.check_went_well(stage.ask("Please LOOK-AROUND."), "One file.")
    stage.check_went_well(stage.ask("AND-NOW?", resume=True), "Still one file.")
    made = turns(stage.generations)
    assert len(made) == 3
    stage.check_turns_cached(exchanges=made)


@pytest.mark.parametrize("model_format", ["xml", "hermes"])
def test_a_second_session_in_the_same_folder_finds_the_first_ones_prompt(
    client: Codex, model_format: str, start_stage: StartStage
) -> None:
    stage = start_stage(client, model_format)
    turn = stage.model.turn
    stage.play(
        line("ASK-ABOUT-EBB", turn("It falls.", thought="Easy.")),
        line("ASK-ABOUT-FLOOD", turn("It rises.", thought="Easy, too.")),
    )
    stage.check_went_well(stage.ask("ASK-ABOUT-EBB"), "It falls.")
    stage.check_went_well(stage.ask("Something else: ASK-ABOUT-FLOOD"), "It rises.")
    second = turns(stage.generations)[-1]
    assert not second.in_prompt("ASK-ABOUT-EBB")
    stage.check_cached(second, 0.97, "second session")


def test_a_sub_agent_runs_and_reports(client: Codex, start_stage: StartStage) -> None:
    stage = start_stage(client)
    turn = stage.model.turn
    spawn = Call("spawn_agent", {"message": "COUNT-THE-FILES please"})
    script = [
        line("SEND-AN-AGENT", turn("I send one.", thought="Delegate.", calls=[spawn])),
        line("agent_id", turn("A moment.", thought="Who is it?", calls=[shell_until("named", "may-wait-$((2 + 2))")])),
        line("COUNT-THE-FILES please", turn(thought="Soon.", calls=[shell_until("waited-for", "counted-$((1 + 2))")])),
        line("counted-3", turn("The agent found two.", thought="Two.")),
        line("The agent found two.", turn("There are two.", thought="It came back.")),
    ]
    stage.play(*script)
    running = stage.start("Please SEND-AN-AGENT.")
    stage.recorder.wait_for(lambda made: any("agent_id" in output for output in outputs(made)), "an agent")
    agent = next(json.loads(output)["agent_id"] for output in outputs(stage.generations) if "agent_id" in output)
    wait = Call("wait_agent", {"ids" if client.version == "0.116.0" else "targets": [agent]})
    stage.play(*script, line("may-wait-4", turn(thought="Patience.", calls=[wait])))
    (stage.project / "named").touch()
    stage.recorder.wait_for(lambda made: any("wait_agent" in exchange.calls for exchange in made), "waiting for it")
    (stage.project / "waited-for").touch()
    stage.check_went_well(running.wait(), "There are two.")
    own = turns(stage.generations)
    assert [exchange.calls for exchange in own if exchange.calls] == [["spawn_agent"], ["exec_command"], ["wait_agent"]]
    stage.check_turns_cached(exchanges=own)


def test_a_patch_is_written_as_free_text(client: Codex, start_stage: StartStage) -> None:
    stage = start_stage(client)
    client.change_catalog(stage.site, {"apply_patch_tool_type": "freeform"})
    turn = stage.model.turn
    patch = '*** Begin Patch\n*** Update File: README.md\n@@\n # Tidelog\n+\n+By "hand".\n*** End Patch\n'
    stage.play(
        line("PATCH-IT", turn("I patch.", thought="One line.", calls=[Call("apply_patch", {"input": patch})])),
        line("M README.md", turn("Patched.", thought="It took.")),
    )
    stage.check_went_well(stage.ask("Please PATCH-IT."), "Patched.")
    assert (stage.project / "README.md").read_text().startswith('# Tidelog\n\nBy "hand".\n\nKeeps')
    made = turns(stage.generations)
    assert "custom" in {tool["type"] for tool in made[0].json["tools"]}
    stage.check_turns_cached(exchanges=made)


def test_compaction_keeps_the_prefix_and_the_session_goes_on(client: Codex, start_stage: StartStage) -> None:
    stage = start_stage(client)
    turn = stage.model.turn
    stage.play(
        line("TELL-ME-OF-TIDES", turn("They come and go. " * 200, thought="Long story.")),
        line("CONTEXT CHECKPOINT COMPACTION", turn("We spoke of tides.", thought="Sum up.")),
        line("GO-ON-THEN", turn("They still do.", thought="Next.")),
    )
    stage.check_went_well(stage.ask("TELL-ME-OF-TIDES"), "They come and go.")
    limit = ["-c", "model_auto_compact_token_limit=23000"]
    stage.check_went_well(stage.ask("GO-ON-THEN", resume=True, arguments=limit), "They still do.")
    told, compaction, after = turns(stage.generations)
    assert after.in_prompt("We spoke of tides.")
    assert not after.in_prompt("They come and go.")
    assert not compaction.json.get("tools")
    if client.version != "0.116.0":
        # The old version does not say when it compacts, and puts what it begins with behind the summary.
        stage.check_turns_cached(exchanges=[told, compaction])
        stage.check_cached(after, 0.97, "after compaction")


def test_an_answer_in_a_given_form_is_asked_for_by_a_schema(client: Codex, start_stage: StartStage) -> None:
    stage = start_stage(client)
    turn = stage.model.turn
    schema = {"type": "object", "properties": {"height": {"type": "number"}}, "required": ["height"]}
    file = stage.site.home / "schema.json"
    file.write_text(json.dumps({**schema, "additionalProperties": False}))
    stage.play(line("HOW-HIGH", turn('{"height": 3.5}', thought="In metres.")))
    outcome = stage.ask("HOW-HIGH is it?", arguments=["--output-schema", str(file)])
    stage.check_went_well(outcome, '{"height": 3.5}')
    assert turns(stage.generations)[-1].json["text"]["format"]["schema"]["required"] == ["height"]
