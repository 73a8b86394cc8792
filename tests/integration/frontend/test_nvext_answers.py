"""What `nvext` asks to be told besides the answer: the fields on all APIs, annotations on the two for completions."""

import json
from functools import partial
from typing import Any

import msgspec
import pytest

from kvbus_testkit.responses import parse_events
from kvbus_testkit.timing import eventually
from kvbus_wire.router import OnboardTerm, Placement, RouteExplanation, RouteRequest, WorkerTerms

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "m", "prompt": "hi"},
}
MESSAGES: dict[str, Any] = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
ALL: dict[str, dict[str, Any]] = {
    **PATHS,
    "/v1/messages": MESSAGES,
    "/v1/responses": {"model": "m", "input": "hi", "store": False},
}


@pytest.mark.parametrize("path", ALL)
async def test_extra_fields_come_with_the_whole_answer(cluster: Any, path: str) -> None:
    await cluster.start()
    asked = {"extra_fields": ["worker_id", "timing", "completion_token_ids", "brand_new"]}
    status, answer = await cluster.post(path, {**ALL[path], "nvext": asked})
    assert status == 200
    told = answer["nvext"]
    assert told["worker_id"] == {"prefill_worker_id": "w1", "decode_worker_id": "w1"}
    assert bytes(told["completion_token_ids"]).decode() == "Hello world"
    assert told["timing"]["total_time_ms"] >= told["timing"]["ttft_ms"] > 0
    assert told["timing"]["kv_hit_rate"] == 0


@pytest.mark.parametrize("path", PATHS)
async def test_extra_fields_come_in_a_chunk_of_their_own_before_the_end_of_a_stream(cluster: Any, path: str) -> None:
    await cluster.start()
    events = await cluster.stream(path, {**PATHS[path], "nvext": {"extra_fields": ["worker_id"]}})
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["nvext"] == {"worker_id": {"prefill_worker_id": "w1", "decode_worker_id": "w1"}}
    assert all("nvext" not in event for event in events[:-2])


@pytest.mark.parametrize(("path", "last"), [("/v1/messages", "message_delta"), ("/v1/responses", "response.completed")])
async def test_extra_fields_come_in_the_last_event_that_tells_of_the_answer(cluster: Any, path: str, last: str) -> None:
    await cluster.start()
    body = {**ALL[path], "stream": True, "nvext": {"extra_fields": ["worker_id"]}}
    async with cluster.session.post(path, json=body) as response:
        events = parse_events(await response.read())
    told = {event["type"]: event.get("response", event) for event in events}
    assert told.pop(last)["nvext"] == {"worker_id": {"prefill_worker_id": "w1", "decode_worker_id": "w1"}}
    assert len(told) > 3
    assert all("nvext" not in event for event in told.values())


@pytest.mark.parametrize("path", ALL)
async def test_an_answer_without_extra_fields_has_no_nvext(cluster: Any, path: str) -> None:
    await cluster.start()
    _, answer = await cluster.post(path, {**ALL[path], "nvext": {"extra_fields": ["brand_new"], "annotations": ["x"]}})
    assert "nvext" not in answer


@pytest.mark.parametrize("path", PATHS)
async def test_annotations_are_events_around_the_chunks(cluster: Any, path: str) -> None:
    await cluster.start()
    names = ["request_id", "formatted_prompt", "token_ids", "llm_metrics", "brand_new"]
    events = await cluster.stream(path, {**PATHS[path], "nvext": {"annotations": names}})
    named = {}
    for event in events:
        if isinstance(event, str) and event.startswith("event: "):
            name, _, data = event.partition("\n")
            named[name.removeprefix("event: ")] = json.loads(data.removeprefix("data: "))
    assert list(named) == ["request_id", "formatted_prompt", "token_ids", "llm_metrics"]
    chunks = [event for event in events if isinstance(event, dict)]
    assert named["request_id"] == chunks[0]["id"]
    assert "hi" in named["formatted_prompt"]
    assert len(named["token_ids"]) == named["llm_metrics"]["input_tokens"]
    assert named["llm_metrics"]["output_tokens"] == len("Hello world")


async def test_a_raw_prompt_goes_to_the_model_without_the_chat_template(cluster: Any) -> None:
    await cluster.start()
    events = await cluster.stream(
        "/v1/chat/completions",
        {
            **PATHS["/v1/chat/completions"],
            "messages": [{"role": "system", "content": "ab"}, {"role": "user", "content": "cd"}],
            "nvext": {"use_raw_prompt": True, "annotations": ["formatted_prompt"]},
        },
    )
    assert events[0] == 'event: formatted_prompt\ndata: "abcd"'


def explained(cluster: Any, message: RouteRequest) -> Placement:
    """A placement that says why, as routers do where they are asked."""
    placement: Placement = cluster.router.place(message)
    terms = WorkerTerms(
        worker_id=placement.worker_id,
        cost_s=0.0315,
        ttft_s=0.03,
        wait_s=0.01,
        prefill_s=0.015,
        work_s=0.0015,
        cached_tokens=32,
        onboard=(OnboardTerm(source="g2", tokens=16, seconds=0.005),),
        uncached_tokens=7,
    )
    told = RouteExplanation(
        request_id=message.request_id,
        router_id="router-1",
        model=message.model,
        policy="first",
        prompt_tokens=message.prompt_tokens,
        worker_id=placement.worker_id,
        workers=(terms, WorkerTerms(worker_id="w9", verdict="draining")),
        left_out=1,
    )
    return msgspec.structs.replace(placement, explanation=told if message.explain else None)


@pytest.mark.parametrize("path", ALL)
async def test_the_router_explains_itself_where_that_is_asked_for(cluster: Any, path: str) -> None:
    await cluster.start()
    cluster.router.answer = partial(explained, cluster)
    _, answer = await cluster.post(path, {**ALL[path], "nvext": {"extra_fields": ["routing"]}})
    routing = answer["nvext"]["routing"]
    assert (routing["worker_id"], routing["policy"], routing["left_out"]) == ("w1", "first", 1)
    best, other = routing["workers"]
    assert (best["cost_ms"], best["ttft_ms"], best["onboard_ms"], best["onboard_tokens"]) == (
        31.5,
        30.0,
        5.0,
        {"g2": 16},
    )
    assert (other["worker_id"], other["verdict"]) == ("w9", "draining")
    _, silent = await cluster.post(path, {**ALL[path], "nvext": {"extra_fields": ["worker_id"]}})
    assert "routing" not in silent["nvext"]
    assert [request.explain for request in cluster.router.requests] == [True, False]


async def test_constraints_reach_the_router(cluster: Any) -> None:
    await cluster.start()
    constraints = {"required_taints": ["h200"], "preferred_taints": {"rack-1": 0.5}}
    path = "/v1/chat/completions"
    await cluster.post(path, {**PATHS[path], "nvext": {"routing_constraints": constraints}})
    (request,) = cluster.router.requests
    assert (request.required_taints, request.preferred_taints) == (("h200",), {"rack-1": 0.5})


@pytest.mark.parametrize(
    ("field", "given"),
    [("prefill_worker_id", 5), ("prefill_worker_id", "w9"), ("decode_worker_id", 5), ("backend_instance_id", 0)],
)
async def test_a_worker_that_is_none_is_named(cluster: Any, field: str, given: int | str) -> None:
    await cluster.start()
    status, answer = await cluster.chat("hi", nvext={field: given})
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, f"nvext.{field}", "unknown_worker")
    assert f"no worker '{given}' of this model; there are w1" in answer["error"]["message"]


async def test_a_number_that_is_the_name_of_a_worker_is_taken(cluster: Any) -> None:
    await cluster.start()
    await cluster.add_worker("5")
    await eventually(lambda: len(cluster.frontend.app._api.models.get("m").offer.workers) == 2)
    status, _ = await cluster.chat("hi", nvext={"prefill_worker_id": 5})
    assert status == 200
    assert cluster.router.requests[-1].prefill_pinned == "5"
