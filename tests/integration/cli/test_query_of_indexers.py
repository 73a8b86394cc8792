"""What `kvbus index query` asks where one of two indexers is cut off, which nobody has noticed yet."""

import asyncio

import pytest

from kvbus_cli.asking import NotAnswered, ask_any
from kvbus_runtime.bus import RequestContext, RequestFailed
from kvbus_runtime.service import Service
from kvbus_testkit.instances import block_keys
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.services import running_service
from kvbus_wire.indexer import IndexQuery, IndexReply, Match

MODEL = "m"


async def serve(member: Service, *, hangs: bool) -> None:
    async def answer(query: IndexQuery, context: RequestContext) -> IndexReply:
        if hangs:
            await asyncio.Event().wait()
        return IndexReply(matches=(Match(instance_id="w1", tier="g1", depth=1),))

    bus = member.bus
    await bus.serve(bus.subjects.index_query("*"), [IndexQuery], answer, queue="indexers")
    await bus.serve(bus.subjects.indexer_query(member.instance_id), [IndexQuery], answer)


async def test_the_one_that_answers_is_enough(nats_server: NatsServer, namespace: str) -> None:
    query = IndexQuery(model=MODEL, keys=block_keys(1), counts=False)
    async with (
        running_service(nats_server.url, namespace, name="indexer", instance_id="i1") as hanging,
        running_service(nats_server.url, namespace, name="indexer", instance_id="i2") as healthy,
    ):
        bus = healthy.bus
        await serve(hanging, hangs=True)
        await serve(healthy, hangs=False)
        for _ in range(8):
            reply = await ask_any(bus, "indexer", bus.subjects.indexer_query, query, IndexReply)
            assert [match.instance_id for match in reply.matches] == ["w1"]


async def test_nobody_to_ask_and_nobody_who_answers_are_told_apart(nats_server: NatsServer, namespace: str) -> None:
    query = IndexQuery(model=MODEL, keys=block_keys(1), counts=False)
    async with running_service(nats_server.url, namespace, name="indexer", instance_id="i1") as mute:
        bus = mute.bus
        with pytest.raises(NotAnswered, match="there is no kvbm"):
            await ask_any(bus, "kvbm", bus.subjects.indexer_query, query, IndexReply)
        with pytest.raises(RequestFailed, match="nobody serves"):
            await ask_any(bus, "indexer", bus.subjects.indexer_query, query, IndexReply)
