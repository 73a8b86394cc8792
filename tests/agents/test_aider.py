"""aider against kvbus: no tools, but files that are edited, commits, and commands whose failures come back."""

import os
import subprocess
from itertools import takewhile

import pytest

from kvbus_testkit.timing import eventually_sync
from tests.agents.clients.aider import ALL, Aider
from tests.agents.conftest import StartStage
from tests.agents.exchange import Exchange
from tests.agents.scenarios import INTERNAL, OVERLOADED
from tests.agents.stage import Stage
from tests.agents.system import Line, line

pytestmark = pytest.mark.parametrize("client", ALL, ids=str)

SUBJECT = "fix: Wrap the hour at midnight"
BEFORE = "def next_tide(hour: float) -> float:\n    return hour + 12.42\n"
WRAPPED = "def next_tide(hour: float) -> float:\n    return (hour + 12.42) % 24\n"
COMMIT = "one-line Git commit messages"
"""Stands in what it asks a commit's message with."""
WITH_USAGE = ["--no-stream"]
"""Of what is streamed it does not ask the usage."""


def edit(stage: Stage, content: str, said: str = "I change it.") -> str:
    """A turn in which the model writes the file anew."""
    return stage.model.turn(f"{said}\n\nsrc/tides.py\n```\n{content}```", thought="A day has 24 hours.")


def session(stage: Stage, *faults: Line) -> list[Line]:
    """An edit and its commit; the faults come first."""
    subject = stage.model.turn(SUBJECT, thought="Say it shortly.")
    commits = [line([COMMIT, asked], subject) for asked in ("WRAP-THE-HOUR", "CHECK-FAILED")]
    return [*commits, *faults, line("WRAP-THE-HOUR", edit(stage, WRAPPED))]


def last_commit(stage: Stage) -> str:
    command = ["git", "log", "-1", "--format=%s"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(stage.site.home)}
    done = subprocess.run(command, cwd=stage.project, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def check_edited(stage: Stage) -> None:
    assert (stage.project / "src" / "tides.py").read_text() == WRAPPED
    assert last_commit(stage) == SUBJECT


def check_shared_found(stage: Stage, before: Exchange, after: Exchange, what: str) -> None:
    """All that the second request has in common with the first one came from the cache.

    That is less than for other clients: what a file holds stands before what was said of it, and changes with each edit.
    """
    first, second = (
        "".join(message["content"] for message in exchange.json["messages"]) for exchange in (before, after)
    )
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    assert after.usage is not None
    stage.check_cached(after, 0.97 * shared / after.usage.prompt_tokens, what)


@pytest.mark.parametrize("model_format", ["xml", "hermes"])
def test_an_edit_is_applied_and_committed(client: Aider, model_format: str, start_stage: StartStage) -> None:
    stage = start_stage(client, model_format)
    stage.play(*session(stage))
    stage.check_went_well(stage.ask("WRAP-THE-HOUR please"), SUBJECT)
    check_edited(stage)
    assert [exchange.json.get("stream", False) for exchange in stage.generations] == [True, False]


def test_what_a_command_says_of_an_edit_comes_back(client: Aider, start_stage: StartStage) -> None:
    stage = start_stage(client)
    check = "grep -q 24 src/tides.py || { echo CHECK-FAILED; exit 1; }"
    wrong = BEFORE.replace("12.42", "12.5")
    stage.play(
        *session(stage, line("WRAP-THE-HOUR", edit(stage, wrong), once=True)),
        line("CHECK-FAILED", edit(stage, WRAPPED, "I forgot to wrap it.")),
    )
    outcome = stage.ask("WRAP-THE-HOUR please", arguments=[*WITH_USAGE, "--auto-test", "--test-cmd", check])
    stage.check_went_well(outcome, "I forgot to wrap it.")
    check_edited(stage)
    first, second = (exchange for exchange in stage.generations if not exchange.in_prompt(COMMIT))
    assert second.in_prompt("CHECK-FAILED")
    check_shared_found(stage, first, second, "after the check")


def test_the_next_turn_and_the_next_session_find_what_they_share(client: Aider, start_stage: StartStage) -> None:
    stage = start_stage(client)
    stage.play(
        *session(stage),
        line("WHY-IS-THAT", stage.model.turn("The day is over then.", thought="Explain.")),
        line("AND-WHAT-ELSE", stage.model.turn("Nothing.", thought="No.")),
    )
    stage.check_went_well(stage.ask("WRAP-THE-HOUR please"), SUBJECT)
    stage.check_went_well(stage.ask("WHY-IS-THAT?", resume=True, arguments=WITH_USAGE), "The day is over then.")
    stage.check_went_well(stage.ask("AND-WHAT-ELSE?", arguments=WITH_USAGE), "Nothing.")
    first, _, next_turn, next_session = stage.generations
    assert next_turn.in_prompt("WRAP-THE-HOUR")
    assert not next_session.in_prompt("WRAP-THE-HOUR")
    check_shared_found(stage, first, next_turn, "next turn")
    check_shared_found(stage, first, next_session, "next session")


@pytest.mark.parametrize("code", ["overloaded", "internal"])
def test_a_refusal_is_tried_again(client: Aider, code: str, start_stage: StartStage) -> None:
    stage = start_stage(client)
    error = {"overloaded": OVERLOADED, "internal": INTERNAL}[code]
    stage.play(*session(stage, line("WRAP-THE-HOUR", error=error, once=True)))
    stage.ask("WRAP-THE-HOUR please")
    assert [exchange.status for exchange in stage.generations] == [{"overloaded": 503, "internal": 500}[code], 200, 200]
    check_edited(stage)


def test_a_busy_gateway_is_tried_again(client: Aider, start_stage: StartStage) -> None:
    stage = start_stage(client)
    stage.play(*session(stage))
    stage.recorder.refuse_next(429, {"error": {"message": "Rate limit reached"}}, {"retry-after": "1"})
    stage.ask("WRAP-THE-HOUR please")
    assert [exchange.status for exchange in stage.generations] == [429, 200, 200]
    check_edited(stage)


def test_a_prompt_that_cannot_fit_is_said_to_be_too_long(client: Aider, start_stage: StartStage) -> None:
    stage = start_stage(client, context_length=3_000)
    stage.play(*session(stage))
    outcome = stage.ask("WRAP-THE-HOUR please")
    assert [exchange.status for exchange in stage.generations] == [400]
    assert "has hit a token limit!" in client.answer(outcome)


def test_a_slow_prefill_is_waited_for(client: Aider, start_stage: StartStage) -> None:
    stage = start_stage(client, settings=["frontend.keep_alive_s=0.1"])
    stage.play(*session(stage, line("WRAP-THE-HOUR", edit(stage, WRAPPED), prefill_s=4)))
    stage.check_went_well(stage.ask("WRAP-THE-HOUR please"), SUBJECT)
    check_edited(stage)
    assert stage.generations[0].response.count(b"\n\n") > 20


@pytest.mark.parametrize("prefill_s", [0, 600])
def test_a_cancelled_turn_frees_the_request(client: Aider, prefill_s: int, start_stage: StartStage) -> None:
    stage = start_stage(client)
    story = stage.model.turn("The tide. " * 3000, thought="Long.")
    stage.play(line("LONG-STORY", story, prefill_s=prefill_s, step_s=0.05))
    running = stage.start("LONG-STORY")
    stage.recorder.wait_for(lambda made: bool(made) and bool(made[0].status), "a request under way")
    if not prefill_s:
        stage.recorder.wait_for(lambda made: len(made[0].response) > 10_000, "an answer under way")
    assert stage.system.worker_metric("kvbus_worker_requests_open") == 1
    running.interrupt()
    running.wait()
    eventually_sync(lambda: stage.system.worker_metric("kvbus_worker_requests_open") == 0, what="the request's end")
    assert stage.generations[0].disconnected
