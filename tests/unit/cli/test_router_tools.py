"""`kvbus router explain` and `kvbus router limits`, without a bus."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kvbus_cli.__main__ import main
from kvbus_cli.asking import Reply
from kvbus_cli.prompt.keys import KeyedPrompt, request_of
from kvbus_cli.prompt.request_file import BadRequestFile, RequestFile
from kvbus_cli.router.explain import ExplainSettings, could_go
from kvbus_cli.router.limits import DISAGREE, LimitSettings, status
from kvbus_cli.router.question import generation_of, route_request
from kvbus_cli.router.tables import explanation_lines, explanation_table, limits_lines, limits_table
from kvbus_cli.tables import print_table
from kvbus_cli.tool import BAD_USAGE, FAILED, print_json
from kvbus_protocols.prompt_view import PromptApi
from kvbus_testkit.wire_samples import EXPLANATION, WORKER_LIMITS
from kvbus_wire.request import AgentHints, SessionRef
from kvbus_wire.router import RouteRequest, RouterLimits, SetLimits, WorkerLimits, WorkerTerms


def shown(*parts: object) -> str:
    console = Console(width=240, record=True, file=StringIO())
    for part in parts:
        console.print(part)
    return console.export_text()


def test_an_explanation_shows_each_workers_terms_and_verdict() -> None:
    text = shown(*explanation_lines(EXPLANATION), explanation_table(EXPLANATION))
    assert "class batch, tenant acme" in text
    assert "prefilled by worker-5: 48 tokens ready after 0.1250" in text
    assert "prefill by worker-6: draining" in text
    assert "r1 went to worker-1" in text
    assert "first token after 0.1250, predicted 0.2500" in text
    row = next(line for line in text.splitlines() if line.startswith("worker-1"))
    assert row.split()[1:10] == [
        "0.4000",
        "0.2500",
        "0.1250",
        "0.0625",
        "0.0625",
        "0.0312",
        "0.5000",
        "-0.1000",
        "x0.5",
    ]
    assert "g2:16" in row
    assert "draining" in text
    assert "and 7 more workers" in text


def test_a_prompt_that_was_not_placed_says_so() -> None:
    told = msgspec.structs.replace(EXPLANATION, worker_id="", ttft_s=None, session_worker_id="")
    assert "nothing was placed" in shown(*explanation_lines(told))


def test_json_holds_fields_that_have_their_default_too(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(EXPLANATION)
    told = json.loads(capsys.readouterr().out)
    assert told["workers"][1] == {**told["workers"][1], "verdict": "draining", "cost_s": 0.0, "onboard": []}


LIMITS = RouterLimits(
    router_id="a", revision=3, in_force=WORKER_LIMITS, stored=WorkerLimits(busy_waiting_tokens=50_000)
)


def test_limits_mark_what_was_changed_and_tell_when_routers_disagree() -> None:
    other = RouterLimits(
        router_id="b", revision=2, in_force=msgspec.structs.replace(WORKER_LIMITS, busy_waiting_tokens=0)
    )
    text = shown(limits_table([LIMITS, other]), *limits_lines([LIMITS, other]))
    assert "50000 *" in text
    assert "0.75 " in text
    assert "do not agree" in text
    assert "do not agree" not in shown(*limits_lines([LIMITS, LIMITS]))
    assert status([Reply("a", LIMITS), Reply("b", other)]) == DISAGREE
    assert status([Reply("a", LIMITS), Reply("b", None, "silent")]) == FAILED
    assert status([Reply("a", LIMITS), Reply("b", LIMITS)]) == 0


def test_flags_become_a_change() -> None:
    assert LimitSettings().change is None
    assert LimitSettings(busy_waiting_tokens=0).change == SetLimits(limits=WorkerLimits(busy_waiting_tokens=0))
    assert LimitSettings(cordon=("w1",), reset=("busy-waiting-tokens",)).change == SetLimits(
        reset=("busy_waiting_tokens",), cordon=("w1",)
    )
    everything = LimitSettings(reset=("all",)).change
    assert everything is not None
    assert everything.reset == WorkerLimits.__struct_fields__


def test_a_prompt_comes_as_text_tokens_or_the_body_of_a_request(tmp_path: Path) -> None:
    assert request_of(model="m", text="hi", tokens="", messages="").fields["nvext"] == {"use_raw_prompt": True}
    assert request_of(model="m", text="", tokens="1, 2 3", messages="").fields["nvext"] == {"token_data": [1, 2, 3]}
    file = tmp_path / "body.json"
    file.write_text('{"model": "x", "system": "s", "messages": []}')
    request = request_of(model="m", text="", tokens="", messages=str(file))
    assert (request.api, json.loads(request.body)["model"]) == ("messages", "m")
    assert request_of(model="", text="", tokens="", messages=str(file)).fields["model"] == "x"


@pytest.mark.parametrize(
    "given",
    [
        {"text": "", "tokens": "", "model": "m"},
        {"text": "a", "tokens": "1", "model": "m"},
        {"text": "a", "tokens": "", "model": ""},
        {"text": "", "tokens": "1,x", "model": "m"},
    ],
)
def test_a_prompt_that_is_none_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(BadRequestFile):
        request_of(messages="", **given)


PROMPT = KeyedPrompt("m", 40, 16, b"k" * 32, context_length=140)
CHAT = {
    "model": "alias",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 70,
    "nvext": {
        "agent_hints": {"osl": 2000, "priority": 3, "strict_priority": 1},
        "decode_worker_id": "w1",
        "routing_constraints": {"required_taints": ["h200"], "preferred_taints": {"cheap": 0.5}},
        "cache_salt": "acme",
    },
    "kvbus": {"session": {"id": "s", "parent": "p", "final": True}},
}


def asked_for(fields: dict[str, Any], headers: dict[str, str], api: PromptApi = "chat") -> RouteRequest:
    request = RequestFile("body", json.dumps(fields).encode(), fields, api)
    return route_request(PROMPT, generation_of(request, headers), 5)


def test_the_router_is_asked_about_the_prompt_of_the_frontend_with_all_that_the_body_says() -> None:
    assert asked_for(CHAT, {}) == RouteRequest(
        request_id="explain",
        model="m",
        keys=b"k" * 32,
        prompt_tokens=40,
        max_tokens=70,
        deadline_ms=5,
        hints=AgentHints(osl=2000, priority=3, strict_priority=1),
        session=SessionRef(id="s", parent="p", final=True),
        tenant="acme",
        pinned="w1",
        required_taints=("h200",),
        preferred_taints={"cheap": 0.5},
    )


def test_flags_for_tenant_and_session_are_headers_and_win_over_the_body() -> None:
    settings = ExplainSettings(tenant="globex", session="other", header=("X-Dynamo-Request-Priority: 9",), api_key="k")
    assert settings.headers["Authorization"] == "Bearer k"
    asked = asked_for(CHAT, settings.headers)
    assert (asked.tenant, asked.hints.priority) == ("globex", 9)
    assert asked.session == SessionRef(id="other")


def test_without_a_limit_the_answer_may_have_the_rest_of_the_context() -> None:
    assert asked_for({"model": "m", "input": "hi"}, {}, "responses").max_tokens == 100
    assert asked_for({"model": "m", "input": "hi", "max_output_tokens": 500}, {}, "responses").max_tokens == 100
    assert asked_for({"model": "m", "input": "hi", "max_output_tokens": 5}, {}, "responses").max_tokens == 5


def test_the_session_that_claude_code_names_in_its_metadata_counts() -> None:
    body = {**CHAT, "kvbus": None, "metadata": {"user_id": json.dumps({"session_id": "abc"})}}
    assert asked_for(body, {}, "messages").session == SessionRef(id="abc")


def test_a_body_that_is_none_of_its_api_is_bad_usage() -> None:
    with pytest.raises(BadRequestFile, match="no request of the API 'messages'"):
        asked_for({"model": "m", "messages": []}, {}, "messages")


def test_an_explanation_says_when_nobody_could_take_the_request() -> None:
    refused = msgspec.structs.replace(EXPLANATION, worker_id="", workers=EXPLANATION.workers[1:])
    assert could_go(EXPLANATION)
    assert could_go(msgspec.structs.replace(EXPLANATION, worker_id=""))
    assert not could_go(refused)
    assert "no worker can take it" in shown(*explanation_lines(refused))
    assert "cost" not in shown(explanation_table(refused))


def test_terms_that_are_nothing_for_all_workers_have_no_column() -> None:
    plain = WorkerTerms(worker_id="w", cost_s=0.5, ttft_s=0.25)
    (heading, row) = shown(
        explanation_table(msgspec.structs.replace(EXPLANATION, workers=(plain,), left_out=0))
    ).splitlines()
    assert heading.split() == ["worker", "cost", "TTFT"]
    assert row.split() == ["w", "0.5000", "0.2500"]


def test_names_and_numbers_are_whole_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    long = msgspec.structs.replace(EXPLANATION.workers[0], worker_id="worker-with-a-long-name-" * 4)
    told = msgspec.structs.replace(EXPLANATION, workers=(long, *EXPLANATION.workers[1:]))
    print_table(explanation_table(told), *explanation_lines(told))
    printed = capsys.readouterr().out
    assert "…" not in printed
    (row,) = (line for line in printed.splitlines() if line.startswith(long.worker_id))
    assert row.split()[1:3] == ["0.4000", "0.2500"]


def test_without_a_bus_the_tools_say_so_and_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvbus_cli.asking.CONNECT_TIMEOUT_S", 0.05)
    nowhere = ["--nats", "nats://127.0.0.1:1"]
    assert main(["router", "limits", *nowhere]) == 1
    assert main(["router", "explain", "--request-id", "r", *nowhere]) == 1
    assert capsys.readouterr().err.count("no bus at nats://127.0.0.1:1") == 2


@pytest.mark.parametrize(
    "given", [[], ["--request-id", "r", "--text", "a"], ["--text", "a"], ["--messages", "not-there"]]
)
def test_bad_usage_of_explain_says_what_is_needed(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "explain", *given]) == BAD_USAGE
    error = capsys.readouterr().err
    assert ("--request-id" in error) == (len(given) != 2)
