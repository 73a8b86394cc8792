"""Scenarios that are the same for every coding agent that has tools for files and a shell, whatever it calls them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from kvbus_testkit.timing import eventually_sync
from tests.agents.client import Client, Outcome
from tests.agents.exchange import Exchange
from tests.agents.model_formats import Call
from tests.agents.stage import Stage
from tests.agents.system import Line, line

INTERNAL = {"code": "internal", "message": "the engine broke"}
OVERLOADED = {"code": "overloaded", "retry_after_s": 1}


class CodingAgent(Client, Protocol):
    """The calls by which this client's model writes a file, reads one, runs a command."""

    def write(self, file: Path, content: str) -> Call: ...

    def read(self, file: Path) -> Call: ...

    def shell(self, command: str) -> Call: ...


class Thought(NamedTuple):
    """A thought as a client sends it back. ``token``: the signature or encrypted content that it was given with."""

    text: str
    token: str


def thoughts_of(exchange: Exchange) -> list[Thought]:
    """The thoughts that a request brings back. Those of chat have no token."""
    found = []
    for item in [*exchange.json.get("messages", []), *exchange.json.get("input", [])]:
        if item.get("type") == "reasoning":
            found.append(Thought("".join(part["text"] for part in item["summary"]), item["encrypted_content"]))
        elif item.get("reasoning_content"):
            found.append(Thought(item["reasoning_content"], ""))
        elif item.get("role") == "assistant" and isinstance(item.get("content"), list):
            blocks = [block for block in item["content"] if block["type"] == "thinking"]
            found += [Thought(block["thinking"], block["signature"]) for block in blocks]
    return found


def check_thoughts(made: Sequence[Exchange], *texts: str) -> None:
    """The last of a session's requests brings back these thoughts, with their tokens where the API has such.

    A client may leave the text of a thought away: its token says it all, if the server gave it.
    """
    thoughts = thoughts_of(made[-1])
    assert len(thoughts) == len(texts), thoughts
    for thought, text in zip(thoughts, texts, strict=True):
        assert thought.text.strip() == text or any(thought.token in earlier.response.decode() for earlier in made)
        assert thought.token or made[-1].path == "/v1/chat/completions"


def loop(client: CodingAgent, stage: Stage, *middle: Line) -> list[Line]:
    """A loop of two turns. The lines in the ``middle`` are asked for its end first."""
    look = client.shell("ls src && echo listed-it")
    return [
        line("LOOK-AROUND", stage.model.turn("I look.", thought="A list.", calls=[look])),
        *middle,
        line(LISTED, stage.model.turn("One file.", thought="That is all.")),
    ]


LISTED = "tides.py\nlisted-it"


def a_note_is_written_and_counted(client: CodingAgent, stage: Stage) -> None:
    turn = stage.model.turn
    file = stage.project / "notes.txt"
    write = client.write(file, "High water at noon.\n")
    count = client.shell("wc -c < notes.txt && echo counted-it")
    stage.play(
        line("WRITE-THE-NOTE", turn("I will write it.", thought="A file is wanted.", calls=[write])),
        line("notes.txt", turn(thought="Now I count.", calls=[count])),
        line("20\ncounted-it", turn("It has 20 characters.", thought="Done.")),
    )
    outcome = stage.ask("Please WRITE-THE-NOTE and count it.")
    stage.check_went_well(outcome, "It has 20 characters.")
    assert file.read_text() == "High water at noon.\n"
    made = stage.generations_of("WRITE-THE-NOTE")
    assert [exchange.calls for exchange in made] == [[write.name], [count.name], []]
    check_thoughts(made, "A file is wanted.", "Now I count.")
    stage.check_turns_cached(exchanges=made)


def calls_are_made_at_once(client: CodingAgent, stage: Stage) -> None:
    turn = stage.model.turn
    calls = [
        client.shell("echo first-$((20 + 1))"),
        client.shell("echo second-$((20 + 2))"),
        client.read(stage.project / "README.md"),
    ]
    stage.play(
        line("DO-ALL-THREE", turn("All at once.", thought="They do not depend on each other.", calls=calls)),
        line("Keeps a log of the tides", turn("All three are done.", thought="Everything came back.")),
    )
    stage.check_went_well(stage.ask("Please DO-ALL-THREE."), "All three are done.")
    first, last = made = stage.generations_of("DO-ALL-THREE")
    assert first.calls == [call.name for call in calls]
    assert last.in_prompt("first-21")
    assert last.in_prompt("second-22")
    check_thoughts(made, "They do not depend on each other.")
    stage.check_turns_cached(exchanges=made)


def the_next_turn_continues_the_session(client: CodingAgent, stage: Stage) -> None:
    stage.play(*loop(client, stage), line("AND-NOW", stage.model.turn("Still one file.", thought="Nothing new.")))
    stage.check_went_well(stage.ask("Please LOOK-AROUND."), "One file.")
    stage.check_went_well(stage.ask("AND-NOW?", resume=True), "Still one file.")
    made = stage.generations_of("LOOK-AROUND")
    assert len(made) == 3
    assert made[-1].in_prompt("AND-NOW?")
    check_thoughts(made, "A list.", "That is all.")
    stage.check_turns_cached(exchanges=made)


def a_second_session_starts_from_the_first_ones_prompt(client: CodingAgent, stage: Stage) -> None:
    turn = stage.model.turn
    stage.play(
        line("ASK-ABOUT-EBB", turn("It falls.", thought="Easy.")),
        line("ASK-ABOUT-FLOOD", turn("It rises.", thought="Easy, too.")),
    )
    stage.check_went_well(stage.ask("ASK-ABOUT-EBB"), "It falls.")
    stage.check_went_well(stage.ask("Something else: ASK-ABOUT-FLOOD"), "It rises.")
    (second,) = stage.generations_of("ASK-ABOUT-FLOOD")
    assert not second.in_prompt("ASK-ABOUT-EBB")
    stage.check_cached(second, 0.97, "second session")


def check_ended_well(stage: Stage, outcome: Outcome, answer: str, *statuses: int) -> None:
    """In spite of a fault, the client came to its answer and complained of nothing; its requests ended with these statuses."""
    said = f"{outcome}\n{stage.summary()}"
    assert outcome.status == 0, said
    assert answer in stage.client.answer(outcome), said
    assert stage.client.complaints(outcome) == [], said
    assert [exchange.status for exchange in stage.generations_of("LOOK-AROUND")] == list(statuses), said


def a_refusal_is_tried_again(client: CodingAgent, stage: Stage, code: str) -> None:
    error = {"overloaded": OVERLOADED, "internal": INTERNAL}[code]
    stage.play(*loop(client, stage, line(LISTED, error=error, once=True)))
    outcome = stage.ask("LOOK-AROUND")
    first, refused, again = stage.generations_of("LOOK-AROUND")
    overloaded = 529 if refused.path.startswith("/v1/messages") else 503
    check_ended_well(stage, outcome, "One file.", 200, overloaded if code == "overloaded" else 500, 200)
    assert ("retry-after" in refused.response_headers) == (code == "overloaded")
    stage.check_turns_cached(exchanges=[first, again])


def a_busy_gateway_is_tried_again(client: CodingAgent, stage: Stage) -> None:
    stage.play(*loop(client, stage))
    body = {"type": "error", "error": {"type": "rate_limit_error", "message": "Rate limit reached"}}
    stage.recorder.refuse_next(429, body, {"retry-after": "1"})
    check_ended_well(stage, stage.ask("LOOK-AROUND"), "One file.", 429, 200, 200)


def a_slow_prefill_is_waited_for(client: CodingAgent, stage: Stage) -> None:
    """``stage`` with a short `frontend.keep_alive_s`: what is minutes long otherwise takes seconds."""
    stage.play(*loop(client, stage, line(LISTED, stage.model.turn("One file.", thought="At last."), prefill_s=4)))
    check_ended_well(stage, stage.ask("LOOK-AROUND"), "One file.", 200, 200)
    assert stage.generations[-1].response.count(b"\n\n") > 20
    stage.check_turns_cached(exchanges=stage.generations_of("LOOK-AROUND"))


def a_cancelled_turn_is_freed(client: CodingAgent, stage: Stage, prefill_s: int) -> None:
    """While the prompt is computed, or with a ``prefill_s`` of 0 while the answer comes."""
    story = stage.model.turn("The tide. " * 3000, thought="Long.")
    stage.play(line("LONG-STORY", story, prefill_s=prefill_s, step_s=0.05))
    running = stage.start("LONG-STORY")
    stage.recorder.wait_for(lambda _: any(e.status for e in stage.generations_of("LONG-STORY")), "a request under way")
    (told,) = stage.generations_of("LONG-STORY")
    if not prefill_s:
        stage.recorder.wait_for(lambda _: len(told.response) > 10_000, "an answer under way")
    assert stage.system.worker_metric("kvbus_worker_requests_open") >= 1
    running.interrupt()
    running.wait()
    eventually_sync(lambda: stage.system.worker_metric("kvbus_worker_requests_open") == 0, what="the request's end")
    assert told.disconnected


def an_engine_fails_in_mid_answer(client: CodingAgent, stage: Stage) -> None:
    half = stage.model.turn("One f", thought="That is")
    stage.play(*loop(client, stage, line(LISTED, half, error=INTERNAL, once=True)))
    check_ended_well(stage, stage.ask("LOOK-AROUND"), "One file.", 200, 200, 200)


def a_connection_breaks_in_mid_answer(client: CodingAgent, stage: Stage) -> None:
    stage.play(
        line("LOOK-AROUND", stage.model.turn("The tide. " * 300, thought="Long."), step_s=0.01, once=True),
        line("LOOK-AROUND", stage.model.turn("One file.", thought="Short.")),
    )
    stage.recorder.cut_next(200)
    check_ended_well(stage, stage.ask("LOOK-AROUND"), "One file.", 200, 200)


def a_prompt_beyond_the_context_says_so(stage: Stage, environment: Mapping[str, str] | None = None) -> None:
    """``stage`` with a context that is shorter than the client's first prompt."""
    outcome = stage.ask("LOOK-AROUND", environment=environment)
    shown = f"{outcome}\n{stage.summary()}"
    assert {exchange.status for exchange in stage.generations} == {400}, shown
    assert len(stage.generations) < 4, shown
    assert outcome.status != 0, shown
    assert "context" in "\n".join(stage.client.complaints(outcome)).lower(), shown


def a_session_that_outgrows_the_context_is_compacted(stage: Stage, summarise: str) -> None:
    """``stage`` with a context in which a question, an answer of 12 K and the next question do not fit as the client counts.

    ``summarise``: stands last in the client's request for a summary.
    """
    turn = stage.model.turn
    stage.play(
        line("TELL-ME-OF-TIDES", turn("They come and go. " * 700, thought="Long story.")),
        line(summarise, turn("We spoke of tides.", thought="Sum up.")),
        line("GO-ON-THEN", turn("They still do.", thought="Next.")),
    )
    stage.check_went_well(stage.ask("TELL-ME-OF-TIDES"), "They come and go.")
    stage.check_went_well(stage.ask("GO-ON-THEN", resume=True), "They still do.")
    last = stage.generations_of("GO-ON-THEN")[-1]
    assert last.in_prompt("We spoke of tides.")
    assert not last.in_prompt("They come and go. They come and go.")
    stage.check_cached(last, 0.5, "after compaction")


def a_sub_agent_runs_and_reports(client: CodingAgent, stage: Stage, send: Call, waiting: str = "") -> None:
    """``send``: the call that gives an agent the errand COUNT-THE-FILES.

    ``waiting``: ends the call's result where the agent runs in the background.
    """
    turn = stage.model.turn
    count = client.shell("ls | wc -l && echo agent-counted")
    stage.play(
        line("SEND-AN-AGENT", turn("I send one.", thought="Delegate.", calls=[send])),
        line("COUNT-THE-FILES", turn("Counting.", thought="A command.", calls=[count])),
        line("agent-counted\n", turn("The agent found two.", thought="Two.")),
        line("The agent found two.", turn("There are two.", thought="It came back.")),
        *([line(waiting, turn("I wait for it.", thought="Patience."))] if waiting else []),
    )
    stage.check_went_well(stage.ask("Please SEND-AN-AGENT."), "There are two.")
    assert [exchange.calls for exchange in stage.generations if exchange.calls] == [[send.name], [count.name]]
    stage.check_turns_cached(exchanges=stage.generations_of("SEND-AN-AGENT"))
