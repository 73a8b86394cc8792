"""`kvbus router explain` and `kvbus router limits`, without a bus."""

import json
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvbus_cli.__main__ import main
from kvbus_cli.asking import Reply
from kvbus_cli.prompt.keys import KeyedPrompt, request_of
from kvbus_cli.prompt.request_file import BadRequestFile
from kvbus_cli.router.explain import route_request
from kvbus_cli.router.limits import DISAGREE, LimitSettings, status
from kvbus_cli.router.tables import explanation_lines, explanation_table, limits_lines, limits_table
from kvbus_cli.tool import FAILED, print_json
from kvbus_testkit.wire_samples import EXPLANATION, WORKER_LIMITS
from kvbus_wire.router import RouterLimits, SetLimits, WorkerLimits


def shown(*parts: object) -> str:
    console = Console(width=240, record=True, file=StringIO())
    for part in parts:
        console.print(part)
    return console.export_text()


def test_an_explanation_shows_each_workers_terms_and_verdict() -> None:
    text = shown(*explanation_lines(EXPLANATION), explanation_table(EXPLANATION))
    assert "class batch, tenant acme" in text
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


def test_the_router_is_asked_about_the_prompt_of_the_frontend() -> None:
    asked = route_request(KeyedPrompt("m", 40, 16, b"k" * 32), "s", "t")
    assert (asked.model, asked.prompt_tokens, asked.keys, asked.tenant) == ("m", 40, b"k" * 32, "t")
    assert asked.session is not None


def test_without_a_bus_the_tools_say_so_and_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvbus_cli.asking.CONNECT_TIMEOUT_S", 0.05)
    nowhere = ["--nats", "nats://127.0.0.1:1"]
    assert main(["router", "limits", *nowhere]) == 1
    assert main(["router", "explain", "--request-id", "r", *nowhere]) == 1
    assert capsys.readouterr().err.count("no bus at nats://127.0.0.1:1") == 2
    assert main(["router", "explain", *nowhere]) == 1
    assert "give one of" in capsys.readouterr().err
