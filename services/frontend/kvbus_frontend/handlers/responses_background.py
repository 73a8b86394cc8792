"""Responses that run with nobody connected: started here, followed and cancelled from any frontend.

The record of such a response names its owner. When the owner is gone for good, whoever looks at the record ends it.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any, Protocol

import msgspec

from kvbus_frontend.adapters.event_stream import EventSink
from kvbus_frontend.adapters.generation import Spawn
from kvbus_frontend.adapters.response_store import ResponseStore
from kvbus_frontend.core.failures import told
from kvbus_frontend.core.stored_responses import StoredResponse
from kvbus_frontend.handlers.api import Api, Ticket
from kvbus_frontend.handlers.responses_flow import Creation, KeepingSink, ResponsesFlow
from kvbus_protocols import sse
from kvbus_protocols.errors import ApiError
from kvbus_runtime.bus import Bus, RequestFailed
from kvbus_runtime.discovery import Directory
from kvbus_wire.frontend import CancelResponse
from kvbus_wire.worker import Done

CANCEL_TIMEOUT_S = 10.0
LOST = {"code": "server_error", "message": "The server that ran this response is gone."}


class _Numbered(msgspec.Struct):
    sequence_number: int = 0


class Instance(Protocol):
    """This frontend."""

    @property
    def instance_id(self) -> str: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def directory(self) -> Directory: ...

    @property
    def bus(self) -> Bus: ...

    @property
    def log(self) -> Any: ...

    @property
    def spawn(self) -> Spawn: ...


class _LogSink:
    """Into the log of the response's events, when it has one, whether or not anybody reads. A log that cannot be written ends the
    stream for its readers, not the response. ``running``: the record from the moment on when an engine has begun."""

    def __init__(self, store: ResponseStore, creation: Creation, running: StoredResponse, log: Any) -> None:
        self._store = store
        self._creation = creation
        self._running = running
        self._log = log
        self._broken = not creation.is_streamed_in_background

    async def open(self) -> None:
        await self._store.save(self._running)

    async def send(self, events: Iterable[bytes]) -> None:
        await self._append(b"".join(events))

    async def close(self) -> None:
        await self._append(b"", last=True)

    async def _append(self, data: bytes, *, last: bool = False) -> None:
        if self._broken or not (data or last):
            return
        try:
            await self._store.events.append(self._creation.id, data, last=last)
        except RequestFailed as failure:
            self._broken = True
            self._log.warning("response_events_lost", response=self._creation.id, reason=str(failure))


class BackgroundResponses:
    def __init__(self, api: Api, flow: ResponsesFlow, instance: Instance) -> None:
        self._api = api
        self._flow = flow
        self._store = flow.store
        self._me = instance
        self._running: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[str] = set()

    # running

    async def begin(self, ticket: Ticket, creation: Creation, admission: AsyncExitStack) -> StoredResponse:
        """Start it; ``admission`` is left when it has ended. Raise ApiError when it cannot be recorded."""
        queued = creation.stored("queued", owner=self._me.instance_id, incarnation=self._me.incarnation)
        if not await self._store.save(queued):
            raise ApiError(503, "The response cannot be stored now.", code="store_unavailable")
        task = self._me.spawn(self._run(ticket, creation, admission.pop_all()), name=f"background {creation.id}")
        self._running[creation.id] = task
        task.add_done_callback(lambda _task: self._running.pop(creation.id, None))
        return queued

    async def _run(self, ticket: Ticket, creation: Creation, admission: AsyncExitStack) -> None:
        """Never raises but by cancellation from outside: whatever happens becomes the response's status."""
        running = creation.stored("in_progress", owner=self._me.instance_id, incarnation=self._me.incarnation)
        sink = _LogSink(self._store, creation, running, self._me.log)
        async with admission:
            try:
                await sink.send(creation.output.queued())
                await self._flow.stream(ticket, creation, sink)
            except asyncio.CancelledError:
                if creation.id not in self._cancelled:
                    raise
                self._cancelled.discard(creation.id)
                ticket.fields["status"] = 499
                await self._end(creation, sink, creation.output.cancelled())
            except Exception as failure:
                error = told(failure)
                ticket.fields["status"] = error.status
                self._api.log_failure(error, creation.id)
                await self._end(creation, sink, creation.output.failure(error))

    async def _end(self, creation: Creation, sink: EventSink, events: Iterable[bytes]) -> None:
        if creation.output.is_ended:
            return
        keeper = KeepingSink(sink, creation.output, lambda: self._flow.keep(creation))
        await keeper.send(events)
        await keeper.close()

    # cancelling

    async def cancel(self, stored: StoredResponse) -> StoredResponse:
        """The response as it is afterwards; one that has ended stays as it is. Raise ApiError."""
        if stored.is_ended:
            return stored
        if stored.owner == self._me.instance_id:
            await self.cancel_here(stored.id)
        else:
            bus = self._me.bus
            with suppress(RequestFailed):  # then it is not running any more, or its record tells below
                subject = bus.subjects.frontend_control(stored.owner)
                await bus.request(subject, CancelResponse(response_id=stored.id), Done, timeout_s=CANCEL_TIMEOUT_S)
        current = await self._store.load(stored.id) or stored
        if current.is_ended:
            return current
        ended = current.ended_as("cancelled")
        await self._store.save(ended)
        return ended

    async def cancel_here(self, response_id: str) -> None:
        """Whether or not it still runs, it does not afterwards."""
        task = self._running.get(response_id)
        if task is None:
            return
        self._cancelled.add(response_id)
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_TIMEOUT_S)

    # looking

    async def current(self, stored: StoredResponse) -> StoredResponse:
        """As it is: one whose owner is gone has failed. Raise ApiError."""
        if stored.is_ended or self._is_alive(stored):
            return stored
        current = await self._store.load(stored.id) or stored  # it may have ended just before its owner did
        if current.is_ended or self._is_alive(current):
            return current
        failed = current.ended_as("failed", LOST)
        await self._store.save(failed)
        return failed

    def _is_alive(self, stored: StoredResponse) -> bool:
        if (stored.owner, stored.incarnation) == (self._me.instance_id, self._me.incarnation):
            return stored.id in self._running
        frontends = self._me.directory.instances("frontend")
        return any((f.instance_id, f.incarnation) == (stored.owner, stored.incarnation) for f in frontends)

    async def follow(self, stored: StoredResponse, *, after: int) -> AsyncGenerator[bytes, None]:
        """The events with a sequence number above ``after``, and comments while there are none. Raise ApiError."""
        rest, number, was_ended = b"", after, False
        async with aclosing(self._store.events.follow(stored.id, idle_s=self._api.settings.keep_alive_s)) as pieces:
            async for piece in pieces:
                if piece is None:
                    stored = await self.current(stored)
                    if was_ended:  # the log is not whole, and what is missing does not come any more
                        yield _terminal(stored, number + 1) + sse.DONE
                        return
                    was_ended = stored.is_ended
                    yield sse.KEEP_ALIVE
                    continue
                *events, rest = (rest + piece.data).split(b"\n\n")
                for event in events:
                    found = _number(event)
                    if found is None or found > after:
                        number = number if found is None else found
                        yield event + b"\n\n"


def _number(event: bytes) -> int | None:
    """None: the sentinel."""
    data = event.partition(b"data: ")[2]
    return None if data == b"[DONE]" else msgspec.json.decode(data, type=_Numbered).sequence_number


class _Terminal(msgspec.Struct):
    type: str
    sequence_number: int
    response: dict[str, Any]


def _terminal(stored: StoredResponse, number: int) -> bytes:
    kind = f"response.{stored.response['status']}"
    return sse.event(_Terminal(kind, number, stored.response), kind)
