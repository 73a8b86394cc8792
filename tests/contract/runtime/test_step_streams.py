"""Step streams between a worker's sender and a frontend's receiver over a real nats-server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.service import Service
from kvbus_runtime.serving import RequestContext
from kvbus_runtime.streams.receiver import ReceiverLimits, StepReceiver, StepStream, StreamLost, StreamOverflow
from kvbus_runtime.streams.sender import SenderLimits, StepSender
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.services import running_service
from kvbus_testkit.timing import eventually, scaled
from kvbus_testkit.wire_samples import SAMPLES
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.frontend import Delta, Ended, Started, StepFrame, TokenLogprob, Usage
from kvbus_wire.message import Decoder, Message
from kvbus_wire.packing import pack_tokens, unpack_tokens
from kvbus_wire.records import InstanceRecord
from kvbus_wire.worker import ReplaySteps

USAGE = Usage(prompt_tokens=1, output_tokens=1)
WORKER = next(sample.worker for sample in SAMPLES if isinstance(sample, InstanceRecord))


class Ends:
    """A worker with its sender and a frontend with its receiver. ``lose``: frames that the wire drops."""

    def __init__(self, worker: Service, frontend: Service, sender: StepSender, receiver: StepReceiver) -> None:
        self.worker = worker
        self.frontend = frontend
        self.sender = sender
        self.receiver = receiver
        self.sent: list[tuple[str, bytes]] = []
        self.lose: Callable[[StepFrame], bool] = lambda frame: False

    def open(self, request_id: str = "r") -> StepStream:
        stream = self.receiver.open(request_id, self.worker.instance_id, self.worker.incarnation)
        self.sender.open(request_id, self.frontend.instance_id)
        return stream

    def start(self, request_id: str = "r") -> None:
        self.sender.add_started(self.frontend.instance_id, Started(request_id, 0))

    def delta(self, start: int, *tokens: int, request_id: str = "r") -> None:
        self.sender.add_delta(self.frontend.instance_id, Delta(request_id, start, pack_tokens(tokens)))

    def end(self, request_id: str = "r") -> None:
        self.sender.add_ended(self.frontend.instance_id, ended(request_id))

    def frames(self) -> list[StepFrame]:
        decoder = Decoder.of(StepFrame)
        return [frame for _, data in self.sent if not (frame := decoder.decode(data)).is_heartbeat]


def ended(request_id: str) -> Ended:
    return Ended(request_id=request_id, reason="stop", usage=USAGE)


async def worker_record(ends: Ends) -> InstanceRecord:
    """As the frontend knows it, and with what makes it a worker's."""
    record = await eventually(lambda: ends.frontend.directory.get(ends.worker.instance_id))
    assert record is not None
    return msgspec.structs.replace(record, worker=WORKER)


@asynccontextmanager
async def both_ends(
    server: NatsServer,
    namespace: str,
    *,
    heartbeat_s: float = 0.2,
    timeout_s: float = 30.0,
    sender_limits: SenderLimits = SenderLimits(),  # noqa: B008
    receiver_limits: ReceiverLimits = ReceiverLimits(),  # noqa: B008
    serve_control: bool = True,
) -> AsyncIterator[Ends]:
    async with (
        running_service(server.url, namespace, name="worker") as worker,
        running_service(server.url, namespace, name="frontend") as frontend,
    ):
        sender = StepSender(worker, heartbeat_s=heartbeat_s, limits=sender_limits)
        receiver = StepReceiver(frontend, heartbeat_timeout_s=timeout_s, limits=receiver_limits)
        await receiver.start()
        ends = Ends(worker, frontend, sender, receiver)

        async def control(message: ReplaySteps, context: RequestContext) -> Message:
            return sender.replay(message)

        if serve_control:
            await worker.bus.serve(worker.bus.subjects.control(worker.instance_id), [ReplaySteps], control)
        publish = worker.bus.publish_bytes
        decoder = Decoder.of(StepFrame)

        async def lossy(subject: str, data: bytes, **fields: object) -> None:
            ends.sent.append((subject, data))
            if not ends.lose(decoder.decode(data)):
                await publish(subject, data, **fields)  # type: ignore[arg-type]

        worker.bus.publish_bytes = lossy  # type: ignore[method-assign]
        yield ends
        await receiver.close()
        await sender.close()


async def read(stream: StepStream) -> tuple[list[int], list[object]]:
    """All tokens, and all other events."""
    tokens: list[int] = []
    others: list[object] = []
    async with asyncio.timeout(scaled(20)):
        async for item in stream:
            if isinstance(item, Delta):
                assert item.start == len(tokens)
                tokens += unpack_tokens(item.tokens)
            else:
                others.append(item)
    return tokens, others


@pytest.mark.usefixtures("no_blocking")
async def test_steps_arrive_in_order_and_end(nats_server: NatsServer, namespace: str) -> None:
    async with both_ends(nats_server, namespace) as ends:
        stream = ends.open()
        ends.start()
        for i in range(200):
            ends.delta(i, i)
            ends.sender.flush()
        ends.end()
        ends.sender.flush()
        assert await read(stream) == (list(range(200)), [Started("r", 0), ended("r")])


@pytest.mark.usefixtures("no_blocking")
async def test_one_step_of_many_requests_is_one_message(nats_server: NatsServer, namespace: str) -> None:
    async with both_ends(nats_server, namespace) as ends:
        names = [f"r{i}" for i in range(20)]
        streams = [ends.open(name) for name in names]
        for name in names:
            ends.start(name)
            ends.delta(0, 1, 2, request_id=name)
            ends.delta(2, 3, request_id=name)
            ends.end(name)
        ends.sender.flush()
        for name, stream in zip(names, streams, strict=True):
            assert await read(stream) == ([1, 2, 3], [Started(name, 0), ended(name)])
        (frame,) = ends.frames()
        assert len(frame.deltas) == 20


async def test_frontends_have_numbers_of_their_own(nats_server: NatsServer, namespace: str) -> None:
    async with both_ends(nats_server, namespace) as ends:
        ends.sender.add_started("elsewhere", Started("x", 0))
        ends.sender.flush()
        ends.start()
        ends.sender.flush()
        await eventually(lambda: len(ends.frames()) == 2)
        assert [frame.seq for frame in ends.frames()] == [1, 1]


@pytest.mark.parametrize("lost", [{1}, {3}, {2, 3, 4}, {1, 3, 5, 7}, {10}, set(range(1, 11))])
@pytest.mark.usefixtures("no_blocking")
async def test_lost_frames_are_fetched_from_the_replay_ring(
    nats_server: NatsServer, namespace: str, lost: set[int]
) -> None:
    async with both_ends(nats_server, namespace) as ends:
        ends.lose = lambda frame: frame.seq in lost and not frame.is_heartbeat
        stream = ends.open()
        # A second request keeps the heartbeats going when the first has ended: they tell of a lost last frame.
        ends.open("other")
        for i in range(10):
            ends.delta(i, i)
            if i == 9:
                ends.end()
            ends.sender.flush()
        assert await read(stream) == (list(range(10)), [ended("r")])
        assert ends.frontend.metrics.value("step_gaps_total") > 0


async def test_a_lost_last_frame_is_noticed_without_heartbeats_by_asking(
    nats_server: NatsServer, namespace: str
) -> None:
    async with both_ends(nats_server, namespace, timeout_s=2.0) as ends:
        ends.lose = lambda frame: bool(frame.ended)
        stream = ends.open()
        ends.delta(0, 1)
        ends.sender.flush()
        ends.end()
        ends.sender.flush()
        assert await read(stream) == ([1], [ended("r")])


async def test_frames_that_left_the_ring_are_a_loss(nats_server: NatsServer, namespace: str) -> None:
    async with both_ends(nats_server, namespace, sender_limits=SenderLimits(ring_frames=2)) as ends:
        stream = ends.open()
        ends.delta(0, 0)
        ends.sender.flush()
        await anext(stream)
        ends.lose = lambda frame: True
        for i in range(1, 6):
            ends.delta(i, i)
            ends.sender.flush()
        await eventually(lambda: len(ends.frames()) == 6)
        ends.lose = lambda frame: False
        ends.delta(6, 6)
        ends.sender.flush()
        with pytest.raises(StreamLost) as loss:
            await read_rest(stream)
        assert (loss.value.worker_id, loss.value.reason) == (ends.worker.instance_id, "frames are gone")
        # What is opened afterwards works.
        again = ends.open("again")
        ends.delta(0, 7, request_id="again")
        ends.end("again")
        ends.sender.flush()
        assert await read(again) == ([7], [ended("again")])


async def read_rest(stream: StepStream) -> None:
    async with asyncio.timeout(scaled(20)):
        async for _ in stream:
            pass


async def test_the_ring_is_bounded_by_bytes(nats_server: NatsServer, namespace: str) -> None:
    async with both_ends(nats_server, namespace, sender_limits=SenderLimits(ring_bytes=1000)) as ends:
        ends.lose = lambda frame: True
        ends.sender.open("r", "f")
        for i in range(10):
            ends.sender.add_delta("f", Delta("r", i * 50, bytes(200)))
            ends.sender.flush()
        incarnation = ends.worker.incarnation
        with pytest.raises(RequestFailed) as gone:
            ends.sender.replay(ReplaySteps(frontend_id="f", incarnation=incarnation, first_seq=6, last_seq=10))
        assert gone.value.code is ErrorCode.GONE
        assert len(ends.sender.replay(replay_of(ends, 8)).frames) == 3
        assert ends.sender.replay(replay_of(ends, 11)).frames == ()


def replay_of(ends: Ends, first: int) -> ReplaySteps:
    return ReplaySteps(frontend_id="f", incarnation=ends.worker.incarnation, first_seq=first, last_seq=first + 9)


async def test_replays_of_another_incarnation_or_of_frames_long_gone_are_refused(
    nats_server: NatsServer, namespace: str
) -> None:
    async with both_ends(nats_server, namespace, sender_limits=SenderLimits(ring_idle_s=0.01)) as ends:
        message = replay_of(ends, 1)
        assert ends.sender.replay(message).frames == ()
        ends.sender.add_ended("f", ended("r"))
        ends.sender.flush()

        def gone(asked: ReplaySteps) -> bool:
            try:
                ends.sender.replay(asked)
            except RequestFailed as failure:
                return failure.code is ErrorCode.GONE
            return False

        assert gone(msgspec.structs.replace(message, incarnation=7))
        await eventually(lambda: gone(message), what="an idle frontend's ring is dropped")


async def test_a_step_above_the_payload_limit_is_split_and_the_order_is_kept(namespace: str) -> None:
    with NatsServer(max_payload_bytes=16 << 10) as server:
        async with both_ends(server, namespace) as ends:
            names = [f"r{i}" for i in range(50)]
            streams = [ends.open(name) for name in names]
            expected: list[int] = list(range(1000))
            for name in names:
                ends.start(name)
                ends.delta(0, *expected, request_id=name)
                ends.end(name)
            ends.sender.flush()
            for name, stream in zip(names, streams, strict=True):
                assert await read(stream) == (expected, [Started(name, 0), ended(name)])
            assert len(ends.frames()) > 10


async def test_one_huge_delta_is_split_and_a_huge_end_is_cut_down(namespace: str) -> None:
    with NatsServer(max_payload_bytes=8 << 10) as server:
        async with both_ends(server, namespace) as ends:
            stream = ends.open()
            tokens = list(range(5000))
            logprobs = tuple(TokenLogprob(t, -1.0) for t in tokens)
            ends.sender.add_delta(ends.frontend.instance_id, Delta("r", 0, pack_tokens(tokens), logprobs))
            error = ErrorReply(code=ErrorCode.INTERNAL, message="x" * 20_000)
            ends.sender.add_ended(
                ends.frontend.instance_id, Ended(request_id="r", reason="error", usage=USAGE, error=error)
            )
            ends.sender.flush()
            received, (end,) = await read(stream)
            assert received == tokens
            assert isinstance(end, Ended)
            assert end.error is not None
            assert end.error.message.startswith("the terminal event")


async def test_a_replay_is_answered_in_portions_that_fit(namespace: str) -> None:
    with NatsServer(max_payload_bytes=8 << 10) as server:
        async with both_ends(server, namespace) as ends:
            ends.lose = lambda frame: not frame.is_heartbeat
            stream = ends.open()
            ends.open("other")
            tokens = list(range(20_000))
            for i in range(0, len(tokens), 500):
                ends.delta(i, *tokens[i : i + 500])
                ends.sender.flush()
            ends.end()
            ends.sender.flush()
            assert await read(stream) == (tokens, [ended("r")])
            assert ends.frontend.metrics.value("step_replays_total", {"outcome": "ok"}) > 5


async def test_heartbeats_flow_only_while_requests_are_open(nats_server: NatsServer, namespace: str) -> None:
    async with both_ends(nats_server, namespace, heartbeat_s=0.05) as ends:
        stream = ends.open()
        metrics = ends.worker.metrics
        await eventually(lambda: metrics.value("step_heartbeats_sent_total") >= 3)
        ends.end()
        ends.sender.flush()
        await read(stream)
        await eventually(lambda: not ends.sender._any_open.is_set())
        ends.sender.open("z", ends.frontend.instance_id)
        ends.sender.discard("z", ends.frontend.instance_id)
        await eventually(lambda: not ends.sender._any_open.is_set())


async def test_a_queued_request_is_not_lost_while_heartbeats_flow(nats_server: NatsServer, namespace: str) -> None:
    async with both_ends(nats_server, namespace, heartbeat_s=0.05, timeout_s=scaled(1.0), serve_control=False) as ends:
        stream = ends.open()
        waiting = asyncio.create_task(read(stream))
        metrics = ends.worker.metrics
        await eventually(lambda: metrics.value("step_heartbeats_sent_total") >= 40 * scaled(1.0))
        assert not waiting.done()
        ends.end()
        ends.sender.flush()
        assert await waiting == ([], [ended("r")])


async def test_a_worker_whose_subjects_nobody_serves_is_lost_before_the_heartbeat_timeout(
    nats_server: NatsServer, namespace: str
) -> None:
    async with both_ends(nats_server, namespace, heartbeat_s=600, timeout_s=5.0, serve_control=False) as ends:
        stream = ends.open()
        with pytest.raises(StreamLost) as loss:
            await read(stream)
        assert loss.value.reason == "nobody serves the worker's subjects"


async def test_a_worker_that_answers_nothing_is_lost_after_the_heartbeat_timeout(
    nats_server: NatsServer, namespace: str
) -> None:
    async with both_ends(nats_server, namespace, heartbeat_s=600, timeout_s=1.0, serve_control=False) as ends:

        async def never(message: ReplaySteps, context: RequestContext) -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        bus = ends.worker.bus
        await bus.serve(bus.subjects.control(ends.worker.instance_id), [ReplaySteps], never)
        stream = ends.open()
        with pytest.raises(StreamLost) as loss:
            await read(stream)
        assert loss.value.reason == "the worker is silent"
        assert ends.frontend.metrics.value("streams_lost_total", {"reason": "the worker is silent"}) == 1


async def test_a_worker_that_leaves_the_directory_is_lost(nats_server: NatsServer, namespace: str) -> None:
    async with both_ends(nats_server, namespace) as ends:
        await eventually(lambda: ends.frontend.directory.get(ends.worker.instance_id))
        stream = ends.open()
        await ends.worker._registration.remove()
        with pytest.raises(StreamLost) as loss:
            await read(stream)
        assert loss.value.reason == "the worker has left"


async def test_streams_of_an_older_incarnation_are_lost(nats_server: NatsServer, namespace: str) -> None:
    async with both_ends(nats_server, namespace) as ends:
        old = ends.receiver.open("old", ends.worker.instance_id, ends.worker.incarnation - 1)
        record = await worker_record(ends)
        ends.receiver._on_instance(record, "joined")
        with pytest.raises(StreamLost):
            await read(old)
        late = ends.receiver.open("late", ends.worker.instance_id, ends.worker.incarnation - 1)
        with pytest.raises(StreamLost):
            await read(late)


async def test_a_frame_of_an_incarnation_that_nobody_has_heard_of_harms_no_stream(
    nats_server: NatsServer, namespace: str
) -> None:
    async with both_ends(nats_server, namespace) as ends:
        stream = ends.open()
        forged = StepFrame(worker_id=ends.worker.instance_id, incarnation=2**63, seq=2**53, ended=(ended("r"),))
        await ends.worker.bus.publish(ends.worker.bus.subjects.steps(ends.frontend.instance_id), forged)
        await eventually(lambda: ends.frontend.metrics.value("step_frames_received_total") >= 1)
        ends.delta(0, 1)
        ends.sender.flush()
        assert isinstance(await anext(stream), Delta)
        later = ends.open("later")
        ends.delta(0, 1, request_id="later")
        ends.sender.flush()
        assert isinstance(await anext(later), Delta)


async def test_a_worker_that_comes_back_after_its_clock_was_put_right_is_heard(
    nats_server: NatsServer, namespace: str
) -> None:
    async with both_ends(nats_server, namespace) as ends:
        record = await worker_record(ends)
        fast = msgspec.structs.replace(record, incarnation=record.incarnation + 86_400_000)
        ends.receiver._on_instance(fast, "joined")
        ends.receiver._on_instance(fast, "left")
        ends.receiver._on_instance(record, "joined")
        stream = ends.open()
        ends.delta(0, 1)
        ends.sender.flush()
        assert isinstance(await anext(stream), Delta)


async def test_a_restarted_frontend_of_the_same_id_picks_the_numbers_up(
    nats_server: NatsServer, namespace: str
) -> None:
    async with both_ends(nats_server, namespace, sender_limits=SenderLimits(ring_frames=3)) as ends:
        for i in range(20):
            ends.delta(i, i, request_id="before")
            ends.sender.flush()
        await eventually(lambda: ends.frontend.metrics.value("step_frames_received_total") >= 20)
        await ends.receiver.close()
        fresh = StepReceiver(ends.frontend, heartbeat_timeout_s=30)
        await fresh.start()
        ends.receiver = fresh
        stream = ends.open("after")
        for i in range(5):
            ends.delta(i, i, request_id="after")
            ends.sender.flush()
        ends.end("after")
        ends.sender.flush()
        assert await read(stream) == (list(range(5)), [ended("after")])


async def test_a_consumer_that_never_reads_ends_in_an_overflow_not_in_memory(
    nats_server: NatsServer, namespace: str
) -> None:
    async with both_ends(nats_server, namespace, receiver_limits=ReceiverLimits(stream_tokens=100)) as ends:
        stream = ends.open()
        for i in range(101):
            ends.delta(i, i)
            ends.sender.flush()
        await eventually(lambda: stream.is_over)
        with pytest.raises(StreamOverflow):
            await read_rest(stream)


async def test_events_of_unknown_or_closed_requests_are_ignored(nats_server: NatsServer, namespace: str) -> None:
    async with both_ends(nats_server, namespace) as ends:
        stream = ends.open()
        closed = ends.open("closed")
        closed.close()
        closed.close()
        for name in ("unknown", "closed", "r"):
            ends.delta(0, 1, request_id=name)
            ends.end(name)
        ends.sender.flush()
        assert await read(stream) == ([1], [ended("r")])
        assert await read(closed) == ([], [])
        await eventually(lambda: ends.frontend.metrics.value("streams_open") == 0)


async def test_a_request_that_begins_anew_in_the_same_step_starts_a_new_frame(
    nats_server: NatsServer, namespace: str
) -> None:
    async with both_ends(nats_server, namespace) as ends:
        ends.start()
        ends.end()
        ends.start()
        ends.end()
        ends.sender.flush()
        await eventually(lambda: len(ends.frames()) == 2)


async def test_closing_the_receiver_loses_open_streams(nats_server: NatsServer, namespace: str) -> None:
    async with both_ends(nats_server, namespace) as ends:
        stream = ends.open()
        await ends.receiver.close()
        with pytest.raises(StreamLost):
            await read(stream)


async def test_a_sender_closes_although_what_publishes_its_frames_has_ended(
    nats_server: NatsServer, namespace: str
) -> None:
    async with running_service(nats_server.url, namespace) as service:
        sender = StepSender(service, heartbeat_s=1.0)
        sender.open("r", "front")
        for task in sender._tasks:
            task.cancel()
        sender.add_ended("front", ended("r"))
        async with asyncio.timeout(scaled(10)):
            await sender.close()


async def test_a_forged_frame_far_ahead_costs_open_streams_and_no_later_ones(
    nats_server: NatsServer, namespace: str
) -> None:
    limits = ReceiverLimits(behind_s=0.3)
    async with both_ends(nats_server, namespace, receiver_limits=limits) as ends:
        stream = ends.open()
        ends.start()
        ends.delta(0, 7)
        ends.sender.flush()
        assert isinstance(await anext(stream), Started)
        assert isinstance(await anext(stream), Delta)
        forged = StepFrame(
            worker_id=ends.worker.instance_id,
            incarnation=ends.worker.incarnation,
            seq=10_000,
            started=(Started("somebody's", 0),),
        )
        await ends.worker.bus.publish(ends.worker.bus.subjects.steps(ends.frontend.instance_id), forged)
        with pytest.raises(StreamLost):
            await anext(stream)
        # The next one is lost as well, at worst, by the time that shows where the worker really stands.
        for attempt in range(3):
            request_id = f"later-{attempt}"
            later = ends.open(request_id)
            ends.sender.add_delta(ends.frontend.instance_id, Delta(request_id, 0, pack_tokens((1, 2))))
            ends.end(request_id)
            ends.sender.flush()
            # Heartbeats go on while a request is open.
            ends.open(f"open-{attempt}")
            try:
                assert [type(item) async for item in later] == [Delta, Ended]
            except StreamLost:
                continue
            return
        pytest.fail("no later stream was received")
