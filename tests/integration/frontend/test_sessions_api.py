"""Sessions over one frontend and over several: what they hold is shown, and what nobody else has is dropped."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from kvbus_blocks.keys import KEY_BYTES
from kvbus_frontend.adapters import session_keeper
from kvbus_frontend.app import Frontend
from kvbus_runtime.service import Service, host
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.timing import eventually
from kvbus_wire.frontend import ForgetSession, WhoseBlocks
from kvbus_wire.indexer import IndexReply, Match
from kvbus_wire.packing import unpack_tokens
from kvbus_wire.router import RouteRequest

TENANT = {"x-tenant-id": "acme"}


def body(text: str, session: str, **ref: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "system", "content": "You are one agent."}, {"role": "user", "content": text}],
        "kvbus": {"session": {"id": session, **ref}},
    }


async def ask(cluster: Any, text: str, session: str, headers: dict[str, str] | None = None, **ref: Any) -> None:
    status, answer = await cluster.post("/v1/chat/completions", body(text, session, **ref), headers=headers or {})
    assert status == 200, answer


async def fetch(cluster: Any, path: str, method: str = "GET", **options: Any) -> tuple[int, Any]:
    async with cluster.session.request(method, path, **options) as response:
        return response.status, await response.json()


def chain(route: RouteRequest) -> list[bytes]:
    return [route.keys[at : at + KEY_BYTES] for at in range(0, len(route.keys), KEY_BYTES)]


async def other_frontend(cluster: Any) -> aiohttp.ClientSession:
    """A client of a second frontend; the cluster's own stays the first one."""
    first, url, session = cluster.frontend, cluster.url, cluster.session
    await cluster.add_frontend(instance_id="front2")
    second = cluster.frontend
    await eventually(lambda: second.service.health.ready, what="a ready second frontend")
    found: aiohttp.ClientSession = cluster.session
    cluster.frontend, cluster.url, cluster.session = first, url, session
    directories = [running.service.directory for running in (first, second)]
    await eventually(
        lambda: all(len(directory.instances("frontend")) == 2 for directory in directories), what="both frontends"
    )
    return found


async def test_a_session_is_shown_with_its_blocks_per_tier_its_leases_and_its_hits(cluster: Any) -> None:
    await cluster.start()
    indexer = await cluster.add_indexer()
    indexer.reply = IndexReply(
        matches=(
            Match(instance_id="w1", tier="g1", depth=3),
            Match(instance_id="k1", tier="g2", depth=5),
            Match(instance_id="k2", tier="g2", depth=4),
            Match(instance_id="w2", tier="g1", depth=9, predicted=True),
        )
    )
    cluster.says("fine")
    kept = [{"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]}]
    asked = {"model": "m", "max_tokens": 9, "messages": kept, "kvbus": {"session": {"id": "s1", "parent": "s0"}}}
    assert (await cluster.post("/v1/messages", asked))[0] == 200
    status, shown = await fetch(cluster, "/v1/sessions/s1")
    assert status == 200
    assert (shown["object"], shown["id"], shown["parent"], shown["model"]) == ("session", "s1", "s0", "m")
    assert (shown["requests"], shown["running"], shown["cached_tokens"], shown["output_tokens"]) == (1, 0, 4, 4)
    assert shown["tiers"] == {"g1": 3, "g2": 5}
    assert shown["blocks"] == len(indexer.queries[0].keys) // KEY_BYTES >= len(chain(cluster.router.requests[0]))
    assert not indexer.queries[0].counts
    (lease,) = shown["leases"]
    assert lease["tokens"] > 0
    assert 0 < lease["expires_at"] - shown["last_used_at"] <= 300
    status, page = await fetch(cluster, "/v1/sessions")
    assert [session["id"] for session in page["data"]] == ["s1"]
    assert page["has_more"] is False


async def test_without_an_indexer_nobody_tells_where_blocks_are(cluster: Any) -> None:
    await cluster.start(session_timeout_s=0.5)
    await ask(cluster, "hi", "s1")
    _, shown = await fetch(cluster, "/v1/sessions/s1")
    assert shown["tiers"] is None


async def test_sessions_come_in_pages_the_newest_first(cluster: Any) -> None:
    await cluster.start()
    await cluster.add_indexer()
    for name in "abcd":
        await ask(cluster, name, name)
    _, first = await fetch(cluster, "/v1/sessions?limit=3")
    assert [session["id"] for session in first["data"]] == ["d", "c", "b"]
    assert first["has_more"]
    _, rest = await fetch(cluster, f"/v1/sessions?limit=3&before={first['data'][-1]['last_used_at']:.9f}")
    assert [session["id"] for session in rest["data"]] == ["a"]


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", f"limit={'9' * 5000}", "before=-1", "before=nan"])
async def test_a_page_that_makes_no_sense_is_refused(cluster: Any, query: str) -> None:
    await cluster.start()
    status, answer = await fetch(cluster, f"/v1/sessions?{query}")
    assert (status, answer["error"]["param"]) == (400, query.partition("=")[0])
    status, _ = await fetch(cluster, f"/v1/sessions/s1?{query}", "DELETE")
    assert status == 404, "nothing is asked of it there"


async def test_deleting_a_session_drops_what_no_other_session_has_from_workers_and_kvbm(cluster: Any) -> None:
    await cluster.start()
    kvbm = await cluster.add_kvbm()
    await eventually(lambda: cluster.frontend.service.directory.instances("kvbm"), what="a kvbm")
    await ask(cluster, "What is one?", "a")
    await ask(cluster, "What is two?", "b")
    one, two = map(chain, cluster.router.requests)
    status, told = await fetch(cluster, "/v1/sessions/a", "DELETE")
    assert status == 200
    assert not set(cluster.worker.dropped) & set(two)
    assert set(one) - set(two) <= set(cluster.worker.dropped)
    assert cluster.worker.dropped[-1] == next(key for key in one if key not in two), "the last ones first"
    assert [drop.keys for drop in kvbm.drops] == [drop.keys for drop in cluster.worker.drops]
    count = len(cluster.worker.dropped)
    assert told == {
        "id": "a", "object": "session.deleted", "deleted": True, "running": 0,
        "blocks": {"g1": count, "g2": count, "g3": count, "g4": 1},
    }  # fmt: skip
    assert (await fetch(cluster, "/v1/sessions/a"))[0] == 404
    assert (await fetch(cluster, "/v1/sessions/a", "DELETE"))[0] == 404


async def test_a_session_that_runs_while_it_is_deleted_lets_go_of_its_blocks_when_it_ends(cluster: Any) -> None:
    await cluster.start()
    go_on = asyncio.Event()

    async def play(output: Any) -> None:
        await output.started()
        await go_on.wait()
        await output.say("late")
        await output.end()

    cluster.worker.play = play
    running = asyncio.create_task(ask(cluster, "What is one?", "a"))
    await eventually(lambda: cluster.worker.requests, what="a request that runs")
    status, told = await fetch(cluster, "/v1/sessions/a", "DELETE")
    assert (status, told["running"], told["blocks"]) == (200, 1, {})
    assert not cluster.worker.drops
    go_on.set()
    await running
    await eventually(lambda: cluster.worker.drops, what="blocks that are dropped")
    assert set(chain(cluster.router.requests[0])) <= set(cluster.worker.dropped)
    assert (await fetch(cluster, "/v1/sessions/a"))[0] == 404


@pytest.mark.parametrize("deleted", ["afterwards", "meanwhile"])
async def test_what_a_worker_says_after_it_was_told_to_stop_goes_with_the_session(cluster: Any, deleted: str) -> None:
    """A block that nobody knows of would keep all blocks above it."""
    await cluster.start()
    go_on = asyncio.Event()

    async def play(output: Any) -> None:
        await output.started()
        await output.say("Hello")
        await cluster.worker.cancelled()
        await go_on.wait()
        await output.say(" and some more of it")
        await output.end("cancelled")

    cluster.worker.play = play
    status, answer = await cluster.post("/v1/chat/completions", {**body("What is one?", "a"), "stop": "ell"})
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "H")
    if deleted == "meanwhile":
        assert (await fetch(cluster, "/v1/sessions/a", "DELETE"))[0] == 200
    go_on.set()
    await eventually(
        lambda: cluster.frontend.service.metrics.value("streams_open") == 0, what="a stream that is closed"
    )
    if deleted == "afterwards":
        assert (await fetch(cluster, "/v1/sessions/a", "DELETE"))[0] == 200
    (message,) = cluster.worker.requests
    said = unpack_tokens(message.tokens) + list(b"Hello and some more of it")
    blocks = (len(said) - 1) // 4  # the last token has not been computed on
    assert blocks > len(chain(cluster.router.requests[0]))
    await eventually(lambda: len(set(cluster.worker.dropped)) == blocks, what="all blocks that are dropped")


async def test_one_tenant_neither_sees_nor_deletes_the_sessions_of_another(cluster: Any) -> None:
    await cluster.start(api_key="k1,k2")
    mine = {"Authorization": "Bearer k1"}
    for headers in ({"Authorization": "Bearer k2"}, {**mine, **TENANT}):
        await ask(cluster, "mine", "s1", mine)
        assert (await fetch(cluster, "/v1/sessions/s1", headers=headers))[0] == 404
        assert (await fetch(cluster, "/v1/sessions/s1", "DELETE", headers=headers))[0] == 404
        assert (await fetch(cluster, "/v1/sessions", headers=headers))[1]["data"] == []
        status, _ = await cluster.post("/v1/kv/prefetch", {"session_id": "s1"}, headers=headers)
        assert status == 404
    assert (await fetch(cluster, "/v1/sessions/s1", headers=mine))[0] == 200
    assert not cluster.worker.drops


async def test_an_ephemeral_session_that_has_ended_is_dropped_and_its_parent_keeps_what_they_share(
    cluster: Any,
) -> None:
    await cluster.start()
    await ask(cluster, "What is all?", "lead")
    await ask(cluster, "What is one?", "sub", parent="lead", ephemeral=True, final=True)
    await eventually(lambda: cluster.worker.drops, what="blocks that are dropped")
    lead, sub = map(chain, cluster.router.requests)
    assert set(sub) - set(lead) <= set(cluster.worker.dropped)
    assert not set(lead) & set(cluster.worker.dropped)
    assert (await fetch(cluster, "/v1/sessions/sub"))[0] == 404


async def test_ephemeral_sub_agents_end_with_the_session_that_is_deleted(cluster: Any) -> None:
    await cluster.start()
    await ask(cluster, "What is all?", "lead")
    await ask(cluster, "What is one?", "sub", parent="lead", ephemeral=True)
    await fetch(cluster, "/v1/sessions/lead", "DELETE")
    everything = {key for route in cluster.router.requests for key in chain(route)}
    await eventually(lambda: everything <= set(cluster.worker.dropped), what="all blocks that are dropped")
    assert (await fetch(cluster, "/v1/sessions/sub"))[0] == 404


async def test_sessions_are_shown_and_deleted_over_all_frontends(cluster: Any) -> None:
    await cluster.start()
    await cluster.add_indexer()
    client = await other_frontend(cluster)
    await ask(cluster, "What is one?", "a")
    async with client.post("/v1/chat/completions", json=body("What is one? And two?", "a")) as response:
        assert response.status == 200
    async with client.post("/v1/chat/completions", json=body("What is two?", "b")) as response:
        assert response.status == 200
    _, page = await fetch(cluster, "/v1/sessions")
    assert [(session["id"], session["requests"]) for session in page["data"]] == [("b", 1), ("a", 2)]
    status, _ = await fetch(cluster, "/v1/sessions/a", "DELETE")
    assert status == 200
    first, second, kept = map(chain, cluster.router.requests)
    dropped = set(cluster.worker.dropped)
    assert not dropped & set(kept), "the other frontend's session needs them"
    assert (set(first) | set(second)) - set(kept) <= dropped
    async with client.get("/v1/sessions/a") as response:
        assert response.status == 404
    async with client.get("/v1/sessions/b") as response:
        assert response.status == 200


async def test_what_is_too_much_for_one_answer_is_dropped_by_the_frontend_that_has_it(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_keeper, "ANSWER_BYTES", 100)
    await cluster.start()
    client = await other_frontend(cluster)
    await ask(cluster, "What is one?", "a")
    async with client.delete("/v1/sessions/a") as response:
        assert response.status == 200
        assert (await response.json())["blocks"] == {}
    keys = set(chain(cluster.router.requests[0]))
    await eventually(lambda: keys <= set(cluster.worker.dropped), what="blocks that are dropped")


async def test_a_frontend_that_does_not_answer_keeps_nobody_from_deleting(cluster: Any) -> None:
    await cluster.start(session_timeout_s=0.2)

    async def nothing(_message: Any, _context: Any) -> Any:
        await asyncio.Event().wait()

    await ask(cluster, "What is one?", "a")
    service = cluster.frontend.service
    async with Silent(cluster, nothing):
        await eventually(lambda: len(service.directory.instances("frontend")) == 2, what="a second frontend")
        status, told = await fetch(cluster, "/v1/sessions/a", "DELETE")
    assert status == 200
    assert told["blocks"]["g1"] > 0
    assert cluster.metric("session_questions_failed_total", service="frontend") >= 2


class Silent:
    """A frontend that hears, and answers by ``answer``."""

    def __init__(self, cluster: Any, answer: Callable[[Any, Any], Awaitable[Any]]) -> None:
        self._cluster = cluster
        self._answer = answer

    async def __aenter__(self) -> None:
        answer = self._answer

        class Dumb:
            async def drain(self, reason: str) -> None: ...

            async def close(self) -> None: ...

        async def start(service: Service, _settings: CommonSettings) -> Dumb:
            subject = service.bus.subjects.frontend_control(service.instance_id)
            await service.bus.serve(subject, [ForgetSession, WhoseBlocks], answer)
            await service.register()
            return Dumb()

        settings = CommonSettings(**self._cluster.common, instance_id="silent")
        self._host = host("frontend", settings, start)
        await self._host.__aenter__()

    async def __aexit__(self, *_error: object) -> None:
        await self._host.__aexit__(None, None, None)


async def test_a_session_that_had_to_make_room_is_deleted_by_its_last_prompt_and_once_only(cluster: Any) -> None:
    await cluster.start(max_sessions=1)
    await ask(cluster, "What is one?", "a")
    held = set(chain(cluster.router.requests[0]))
    await ask(cluster, "What is two?", "b")
    shared = held & set(chain(cluster.router.requests[1]))
    assert (await fetch(cluster, "/v1/sessions/a"))[0] == 404
    status, told = await fetch(cluster, "/v1/sessions/a", "DELETE")
    assert (status, told["running"]) == (200, 0)
    assert held - shared <= set(cluster.worker.dropped)
    assert not shared & set(cluster.worker.dropped)
    assert (await fetch(cluster, "/v1/sessions/a", "DELETE"))[0] == 404


async def test_what_was_heard_of_a_rest_that_never_ends_belongs_to_the_session(cluster: Any) -> None:
    await cluster.start(rest_timeout_s=0.3)
    go_on = asyncio.Event()

    async def play(output: Any) -> None:
        await output.started()
        await output.say("Hello")
        await cluster.worker.cancelled()
        await output.say(" and some more of it")
        await go_on.wait()

    cluster.worker.play = play
    status, _ = await cluster.post("/v1/chat/completions", {**body("What is one?", "a"), "stop": "ell"})
    assert status == 200
    await eventually(lambda: cluster.metric("rests_cut_total") == 1, what="a rest that is not waited for any more")
    assert (await fetch(cluster, "/v1/sessions/a", "DELETE"))[0] == 200
    (message,) = cluster.worker.requests
    said = unpack_tokens(message.tokens) + list(b"Hello and some more of it")
    assert len(set(cluster.worker.dropped)) == (len(said) - 1) // 4
    go_on.set()


async def test_the_number_of_sessions_is_bounded(cluster: Any) -> None:
    await cluster.start(max_sessions=2)
    await cluster.add_indexer()
    for name in "abc":
        await ask(cluster, name, name)
    _, page = await fetch(cluster, "/v1/sessions")
    assert [session["id"] for session in page["data"]] == ["c", "b"]
    assert cluster.metric("sessions") == 2
    assert cluster.metric("sessions_forgotten") == 1
    assert isinstance(cluster.frontend.app, Frontend)
