"""Step streams over a bus that restarts: the exact content, once and in order."""

import asyncio
from collections.abc import Iterator

import pytest

from kvbus_runtime.serving import RequestContext
from kvbus_runtime.streams.receiver import StepReceiver, StreamLost
from kvbus_runtime.streams.sender import StepSender
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.services import running_service
from kvbus_testkit.timing import eventually, scaled
from kvbus_wire.frontend import Delta, Ended, Usage
from kvbus_wire.message import Message
from kvbus_wire.packing import pack_tokens, unpack_tokens
from kvbus_wire.worker import ReplaySteps

END = Ended(request_id="r", reason="stop", usage=Usage(prompt_tokens=1, output_tokens=1))


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as own:
        yield own


@pytest.mark.parametrize("wipe", [False, True])
async def test_a_stream_goes_on_over_restarts_of_the_bus(server: NatsServer, wipe: bool) -> None:
    async with (
        running_service(server.url, "n", name="worker") as worker,
        running_service(server.url, "n", name="frontend") as frontend,
    ):
        sender = StepSender(worker, heartbeat_s=0.1)
        receiver = StepReceiver(frontend, heartbeat_timeout_s=scaled(20))
        await receiver.start()

        async def control(message: ReplaySteps, context: RequestContext) -> Message:
            return sender.replay(message)

        await worker.bus.serve(worker.bus.subjects.control(worker.instance_id), [ReplaySteps], control)
        stream = receiver.open("r", worker.instance_id, worker.incarnation)
        sender.open("r", frontend.instance_id)
        tokens: list[int] = []

        async def read() -> object:
            async for item in stream:
                if not isinstance(item, Delta):
                    return item
                assert item.start == len(tokens)
                tokens.extend(unpack_tokens(item.tokens))
            return None

        reading = asyncio.create_task(read())
        sent = 0

        def emit(count: int) -> None:
            nonlocal sent
            for _ in range(count):
                sender.add_delta(frontend.instance_id, Delta("r", sent, pack_tokens([sent])))
                sender.flush()
                sent += 1

        for _ in range(3):
            emit(50)
            await asyncio.sleep(0)
            emit(10)
            server.restart(wipe=wipe)
            emit(50)
            await eventually(lambda: worker.bus.is_connected and frontend.bus.is_connected, timeout_s=30)
        sender.add_ended(frontend.instance_id, END)
        sender.flush()
        async with asyncio.timeout(scaled(40)):
            assert await reading == END
        assert tokens == list(range(sent))
        await receiver.close()
        await sender.close()


async def test_a_worker_that_dies_is_noticed_and_an_outage_alone_is_not_taken_for_it(server: NatsServer) -> None:
    async with running_service(server.url, "n", name="frontend") as frontend:
        receiver = StepReceiver(frontend, heartbeat_timeout_s=scaled(2))
        await receiver.start()
        async with running_service(server.url, "n", name="worker", lease_ttl_s=60) as worker:
            sender = StepSender(worker, heartbeat_s=0.1)
            stream = receiver.open("r", worker.instance_id, worker.incarnation)
            sender.open("r", frontend.instance_id)
            waiting = asyncio.create_task(anext(stream))
            server.kill()
            await eventually(lambda: not frontend.bus.is_connected)
            await asyncio.sleep(scaled(2.5))  # longer than the heartbeat timeout
            assert not waiting.done()
            server.start()
            beats = frontend.metrics.value("step_frames_received_total")
            await eventually(lambda: frontend.metrics.value("step_frames_received_total") > beats + 2, timeout_s=30)
            assert not waiting.done()
            # It stops without a word: no record removed, no terminal event.
            await worker.bus.close()
            with pytest.raises(StreamLost) as loss:
                async with asyncio.timeout(scaled(20)):
                    await waiting
            assert loss.value.reason in ("nobody serves the worker's subjects", "the worker is silent")
        await receiver.close()
