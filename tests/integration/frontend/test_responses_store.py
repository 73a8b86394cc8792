"""Stored responses: found by any frontend, through restarts, within limits."""

import asyncio
import random
from typing import Any

import msgspec
import pytest

from kvbus_frontend.adapters.response_store import ResponseStore
from kvbus_frontend.core.stored_responses import StoredResponse
from kvbus_runtime.buckets import Bucket, BucketLimits
from kvbus_testkit.responses import check_schema
from kvbus_testkit.timing import eventually

LOOKUP = {"type": "function", "name": "lookup", "parameters": {"type": "object"}}


async def get(cluster: Any, path: str) -> tuple[int, Any]:
    async with cluster.session.get(f"/v1/responses/{path}") as response:
        return response.status, await response.json()


async def delete(cluster: Any, response_id: str) -> tuple[int, Any]:
    async with cluster.session.delete(f"/v1/responses/{response_id}") as response:
        return response.status, await response.json()


async def call_lookup(output: Any) -> None:
    await output.started()
    await output.say('<tool_call>\n{"name": "lookup",  "arguments": {"b": 1,  "a": 2}}\n</tool_call>')
    await output.end()


async def test_a_response_is_found_as_it_was_sent(cluster: Any) -> None:
    await cluster.start()
    _, made = await cluster.respond(metadata={"k": "v"})
    assert await get(cluster, made["id"]) == (200, made)


async def test_a_streamed_response_can_be_found_when_its_end_is_seen(cluster: Any) -> None:
    await cluster.start()
    events = await cluster.respond_stream()
    assert await get(cluster, events[-1]["response"]["id"]) == (200, events[-1]["response"])


async def test_what_was_said_before_is_part_of_the_prompt_and_old_instructions_are_not(cluster: Any) -> None:
    await cluster.start()
    _, first = await cluster.respond("one", instructions="old")
    _, second = await cluster.respond("two", previous_response_id=first["id"], instructions="new")
    _, third = await cluster.respond([{"role": "user", "content": "three"}], previous_response_id=second["id"])
    assert third["previous_response_id"] == second["id"]
    assert [prompt.split() for prompt in cluster.prompts()] == [
        ["system", "old", "user", "one", "assistant"],
        ["system", "new", "user", "one", "assistant", "Hello", "world", "user", "two", "assistant"],
        [
            "user",
            "one",
            "assistant",
            "Hello",
            "world",
            "user",
            "two",
            "assistant",
            "Hello",
            "world",
            "user",
            "three",
            "assistant",
        ],
    ]


async def test_calls_and_results_meet_over_requests_and_arguments_keep_their_bytes(cluster: Any) -> None:
    await cluster.start(card={"tool_call_parser": "hermes"})
    cluster.worker.play = call_lookup
    _, first = await cluster.respond(tools=[LOOKUP])
    (call,) = first["output"]
    assert call["arguments"] == '{"b": 1,  "a": 2}'
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
    status, second = await cluster.respond([result], previous_response_id=first["id"], tools=[LOOKUP])
    assert status == 200
    _, items = await get(cluster, f"{second['id']}/input_items?order=asc")
    assert [item["type"] for item in items["data"]] == ["message", "function_call", "function_call_output"]
    assert items["data"][1]["arguments"] == '{"b": 1,  "a": 2}'


async def test_input_items_come_in_pages(cluster: Any) -> None:
    await cluster.start()
    items = [{"role": "user", "content": f"m{i}"} for i in range(5)]
    _, made = await cluster.respond([*items, {"role": "assistant", "content": "a"}])
    _, newest = await get(cluster, f"{made['id']}/input_items?limit=2")
    check_schema("ResponseItemList", newest)
    assert [item["content"][0]["text"] for item in newest["data"]] == ["a", "m4"]
    assert newest["has_more"]
    assert (newest["first_id"], newest["last_id"]) == (newest["data"][0]["id"], newest["data"][1]["id"])
    _, rest = await get(cluster, f"{made['id']}/input_items?limit=4&after={newest['last_id']}")
    assert ([item["content"][0]["text"] for item in rest["data"]], rest["has_more"]) == (
        ["m3", "m2", "m1", "m0"],
        False,
    )
    _, oldest = await get(cluster, f"{made['id']}/input_items?limit=1&order=asc")
    assert oldest["data"] == [rest["data"][-1]]


@pytest.mark.parametrize(
    ("query", "param"), [("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order"), ("after=x", "after")]
)
async def test_a_bad_page_is_refused(cluster: Any, query: str, param: str) -> None:
    await cluster.start()
    _, made = await cluster.respond()
    status, body = await get(cluster, f"{made['id']}/input_items?{query}")
    assert (status, body["error"]["param"]) == (400, param)


async def test_items_can_be_referred_to_by_their_ids_alone(cluster: Any) -> None:
    await cluster.start()
    _, made = await cluster.respond("first")
    _, listed = await get(cluster, f"{made['id']}/input_items")
    items = [
        {"type": "item_reference", "id": listed["data"][0]["id"]},
        {"id": made["output"][0]["id"]},
        {"role": "user", "content": "second"},
    ]
    status, _ = await cluster.respond(items)
    assert status == 200
    prompt = cluster.prompts()[1]
    assert prompt.index("first") < prompt.index("Hello world") < prompt.index("second")


async def test_what_is_not_stored_is_not_found(cluster: Any) -> None:
    await cluster.start()
    _, made = await cluster.respond(store=False)
    assert made["store"] is False
    status, body = await get(cluster, made["id"])
    assert (status, body["error"]["code"]) == (404, "response_not_found")
    status, body = await cluster.respond(previous_response_id=made["id"])
    assert (status, body["error"]["code"]) == (400, "previous_response_not_found")


async def test_a_deleted_response_is_gone(cluster: Any) -> None:
    await cluster.start()
    _, made = await cluster.respond()
    assert await delete(cluster, made["id"]) == (200, {"id": made["id"], "object": "response", "deleted": True})
    assert (await get(cluster, made["id"]))[0] == 404
    assert (await delete(cluster, made["id"]))[0] == 404
    status, body = await cluster.respond(previous_response_id=made["id"])
    assert (status, body["error"]["code"]) == (400, "previous_response_not_found")


@pytest.mark.parametrize("path", ["resp_x", "resp_" + "0" * 48, "resp_*", "resp_" + "0" * 48 + "/input_items"])
async def test_an_unknown_response_is_not_found(cluster: Any, path: str) -> None:
    await cluster.start()
    status, body = await get(cluster, path)
    assert (status, body["error"]["code"], body["error"]["type"]) == (
        404,
        "response_not_found",
        "invalid_request_error",
    )


async def test_another_frontend_and_one_that_was_started_later_go_on_with_it(cluster: Any) -> None:
    await cluster.start()
    _, first = await cluster.respond("one", store=True)
    await cluster.add_frontend(instance_id="other")
    await eventually(lambda: cluster.frontend.service.health.ready, what="a second frontend")
    assert await get(cluster, first["id"]) == (200, first)
    status, second = await cluster.respond("two", previous_response_id=first["id"])
    assert status == 200
    cluster.frontend.service.stop("a restart")
    await cluster.add_frontend(instance_id="third")
    await eventually(lambda: cluster.frontend.service.health.ready, what="a third frontend")
    status, _ = await cluster.respond("three", previous_response_id=second["id"])
    assert status == 200
    assert cluster.prompts()[2].index("one") < cluster.prompts()[2].index("two") < cluster.prompts()[2].index("three")


async def test_frontends_open_what_others_have_sealed(cluster: Any) -> None:
    await cluster.start(card={"reasoning_parser": "qwen3"})

    async def think(output: Any) -> None:
        await output.started()
        await output.say("<think>\nwhy\n</think>\n\nSo.")
        await output.end()

    cluster.worker.play = think
    _, made = await cluster.respond(store=False)
    await cluster.add_frontend(instance_id="other")
    await eventually(lambda: cluster.frontend.service.health.ready, what="a second frontend")
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": made["output"][0]["encrypted_content"]}
    changed = {**sealed, "encrypted_content": sealed["encrypted_content"][:-8] + "AAAAAAA="}
    counts = []
    for item in (sealed, changed):
        _, counted = await cluster.post(
            "/v1/responses", {"model": "m", "input": [{"role": "user", "content": "x"}, item], "store": False}
        )
        counts.append(counted["usage"]["input_tokens"])
    assert counts[0] > counts[1]


async def test_beyond_the_number_of_entries_the_oldest_responses_go(cluster: Any) -> None:
    await cluster.start(response_store_entries=2)
    made = [(await cluster.respond(f"m{i}"))[1] for i in range(3)]
    assert [(await get(cluster, one["id"]))[0] for one in made] == [404, 200, 200]
    assert cluster.metric("responses_saved_total", outcome="stored") == 3
    assert cluster.metric("responses_loaded_total", outcome="missing") == 1
    assert cluster.metric("response_store_entries") == 1  # as it was when it was last looked at
    assert cluster.metric("response_store_bytes") > 0


async def test_beyond_the_bytes_the_oldest_responses_go(cluster: Any) -> None:
    await cluster.start(response_store_bytes=7000, card={"context_length": 8192})
    made = [(await cluster.respond(random.Random(i).randbytes(2000).hex()))[1] for i in range(3)]
    assert [(await get(cluster, one["id"]))[0] for one in made] == [404, 200, 200]


async def test_a_response_above_the_limit_is_answered_and_not_stored(cluster: Any) -> None:
    await cluster.start(max_stored_response_bytes=200)
    status, made = await cluster.respond()
    assert (status, made["status"]) == (200, "completed")
    assert (await get(cluster, made["id"]))[0] == 404
    assert cluster.metric("responses_saved_total", outcome="too_large") == 1


async def test_responses_expire(cluster: Any) -> None:
    await cluster.start(response_ttl_s=0.2)
    _, made = await cluster.respond()

    async with asyncio.timeout(30):
        while (await get(cluster, made["id"]))[0] != 404:
            pass


async def test_a_bus_without_room_for_the_store_costs_no_answer(own_bus_cluster: Any) -> None:
    _, cluster = own_bus_cluster
    await cluster.start(response_store_bytes=1 << 50)
    status, _ = await cluster.respond()
    assert status == 200
    assert cluster.metric("responses_saved_total", outcome="unavailable") == 1


async def test_bytes_that_are_no_response_are_not_found(cluster: Any) -> None:
    await cluster.start()
    _, made = await cluster.respond()
    bus = cluster.frontend.service.bus
    await Bucket(bus, bus.subjects.responses_bucket, BucketLimits()).put(made["id"], b"not zlib")
    assert (await get(cluster, made["id"]))[0] == 404


async def test_a_long_history_is_stored_in_parts(cluster: Any) -> None:
    await cluster.start()
    store = ResponseStore(
        cluster.frontend.service.bus,
        cluster.frontend.service.settings,
        cluster.frontend.service.metrics,
        cluster.frontend.service.log,
    )
    blob = random.Random(1).randbytes(2_000_000).hex()
    response = {"id": "resp_" + "1" * 48, "status": "completed", "output": []}
    stored = StoredResponse(response=response, input=[{"id": "msg_1", "type": "message", "content": blob}])
    assert await store.save(stored)
    assert msgspec.json.encode(await store.load(stored.id)) == msgspec.json.encode(stored)
