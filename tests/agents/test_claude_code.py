"""Claude Code against kvbus."""

import pytest

from tests.agents.clients.claude_code import ALL, ClaudeCode
from tests.agents.conftest import StartStage
from tests.agents.model_formats import Call
from tests.agents.system import line

pytestmark = pytest.mark.parametrize("client", ALL, ids=lambda client: client.version)


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
