"""The bus restarts under a frontend with work in flight."""

import asyncio
from typing import Any


async def test_a_bus_that_restarts_costs_no_request(own_bus_cluster: tuple[Any, Any]) -> None:
    server, cluster = own_bus_cluster
    await cluster.start()
    hello, begun, go_on = cluster.worker.play, asyncio.Event(), asyncio.Event()

    async def play(output: Any) -> None:
        await output.started()
        await output.say("before ")
        begun.set()
        await go_on.wait()
        await output.say("after")
        await output.end()

    cluster.worker.play = play
    answer = asyncio.create_task(cluster.chat())
    await begun.wait()
    await asyncio.to_thread(server.restart)
    go_on.set()
    status, body = await answer
    assert (status, body["choices"][0]["message"]["content"]) == (200, "before after")
    cluster.worker.play = hello
    assert (await cluster.chat())[0] == 200


async def test_a_request_during_an_outage_waits_for_the_bus(own_bus_cluster: tuple[Any, Any]) -> None:
    server, cluster = own_bus_cluster
    await cluster.start()
    await asyncio.to_thread(server.terminate)
    answer = asyncio.create_task(cluster.chat())
    await asyncio.sleep(0)
    await asyncio.to_thread(server.start)
    status, body = await answer
    assert (status, body["choices"][0]["message"]["content"]) == (200, "Hello world")
