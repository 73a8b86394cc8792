"""Tagged messages of UCX, for what cannot be read one-sided (tcp, device memory): the owner sends one per block, to a worker that
the reader has for this read alone.

The library's own progress modes are not used: a thread or a poller of it takes a core while nothing happens. Here both sides make
progress on the event loop, only while something is under way. That the other side has died shows on the connection that asked.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from kvbus_transfer.backends.base import ReadJob
from kvbus_transfer.backends.ucx_library import NAME, UcxLibrary
from kvbus_transfer.backends.ucx_progress import Progress
from kvbus_transfer.endings import to_the_end
from kvbus_transfer.errors import BackendFailed
from kvbus_transfer.hosts import container_identity
from kvbus_transfer.limits import TransferLimits
from kvbus_transfer.messages import Fetch

_PIECE_BYTES = 2 << 20
_ENDPOINTS_KEPT = 64
_ABANDON_S = 0.5


class Target(msgspec.Struct, frozen=True, array_like=True):
    """Where to send: address of the reader's worker, tag of the first message. ``handles_errors``: the endpoint notices by itself
    that the peer is gone. For device memory, between processes of one container, it need not, and is ten times faster. Everywhere
    else it must: without, UCX waits for ever, or ends the process when a copy fails."""

    address: bytes
    tag: int
    handles_errors: bool


class TaggedMessages:
    def __init__(self, ucx: UcxLibrary, limits: TransferLimits) -> None:
        """Raise what ucxx raises."""
        self.info = container_identity().encode()
        """What readers must know."""
        self._ucx = ucx.binding
        self._wrap = ucx.array
        self._context: Any = ucx.context((self._ucx.Feature.TAG, self._ucx.Feature.WAKEUP))
        self._worker: Progress | None = self._make_channel()
        self._endpoints: dict[Target, Any] = {}
        self._idle: list[Progress] = []
        self._channels = asyncio.Semaphore(limits.connections)

    def _make_channel(self) -> Progress:
        return Progress(self._ucx.UCXWorker(self._context))

    def stop(self) -> None:
        self._endpoints.clear()
        self._idle.clear()
        self._worker = None
        self._context = None

    async def push(self, payload: bytes, views: Sequence[Any]) -> None:
        """Raise BackendFailed."""
        target = msgspec.msgpack.decode(payload, type=Target)
        sending: list[Any] = []
        worker = self._worker
        if worker is None:
            raise BackendFailed("UCX was stopped")
        try:
            endpoint = self._endpoint(worker, target)
            for number, piece in enumerate(pieces_of(views)):
                sending.append(endpoint.tag_send(self._wrap(piece), self._ucx.UCXXTag(target.tag + number)))
        except Exception as error:
            raise BackendFailed(f"UCX: {error}") from error
        await self._complete(worker, sending, lambda: None)

    def _endpoint(self, worker: Progress, target: Target) -> Any:
        key = msgspec.structs.replace(target, tag=0)
        endpoint = self._endpoints.pop(key, None)
        if endpoint is None:
            address = self._ucx.UCXAddress.create_from_buffer(target.address)
            endpoint = self._ucx.UCXEndpoint.create_from_worker_address(worker.worker, address, target.handles_errors)
        self._endpoints[key] = endpoint
        while len(self._endpoints) > _ENDPOINTS_KEPT:
            del self._endpoints[next(iter(self._endpoints))]
        return endpoint

    async def _complete(self, progress: Progress, requests: list[Any], look: Callable[[], None]) -> None:
        """Make progress until all are done; ``look`` raises when that is in vain. Raise BackendFailed."""
        done = 0
        while done < len(requests):
            while done < len(requests) and requests[done].completed:
                try:
                    requests[done].check_error()
                except Exception as error:
                    raise BackendFailed(f"UCX: {error}") from error
                done += 1
            if done < len(requests):
                look()
                await progress.step()

    async def fetch(self, job: ReadJob) -> None:
        async with self._channel() as channel:
            tag = secrets.randbits(47) << 16
            receiving = [
                channel.worker.tag_recv(self._wrap(piece), self._ucx.UCXXTag(tag + number))
                for number, piece in enumerate(pieces_of(job.targets))
            ]
            target = Target(channel.address, tag, self._must_handle_errors(job))
            fetch = Fetch(
                grant=job.grant,
                indices=job.indices,
                deadline_s=job.deadline_s,
                backend=NAME,
                payload=msgspec.msgpack.encode(target),
            )
            asking = asyncio.get_running_loop().create_task(job.peer.ask(fetch))
            asking.add_done_callback(lambda _: channel.wake())
            try:
                await self._complete(channel, receiving, lambda: _raise_failure(asking))
                await asyncio.shield(asking)
            except BaseException:
                await to_the_end(self._abandon(asking, channel, receiving))
                receiving.clear()  # they refer to the worker, and the error's traceback to them
                channel.close()
                raise

    def _must_handle_errors(self, job: ReadJob) -> bool:
        on_device = not any(isinstance(target, memoryview) for target in job.targets)
        return not on_device or job.peer.info.backends[NAME] != self.info

    async def _abandon(self, asking: "asyncio.Task[Any]", channel: Progress, receiving: Sequence[Any]) -> None:
        """Nothing may write to the targets any more: what is under way arrives, unless the owner is gone. What then is left can
        only be written by a worker that nobody calls again."""
        until = time.monotonic() + _ABANDON_S
        while time.monotonic() < until and not all(request.completed for request in receiving):
            if asking.done() and (asking.cancelled() or asking.exception() is not None):
                break
            await channel.step()
        asking.cancel()
        await asyncio.wait([asking])
        if not asking.cancelled():
            asking.exception()

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[Progress]:
        """A worker for one read. It is kept when the block ends well, thrown away when it does not."""
        async with self._channels:
            channel = self._idle.pop() if self._idle else await asyncio.to_thread(self._make_channel)
            yield channel
            self._idle.append(channel)


def _raise_failure(asking: "asyncio.Task[Any]") -> None:
    if asking.done() and (error := asking.exception()) is not None:
        raise error


def pieces_of(blocks: Sequence[Any]) -> list[Any]:
    """Both sides cut blocks in the same way: one message must not keep the loop for long."""
    return [block[start : start + _PIECE_BYTES] for block in blocks for start in range(0, block.nbytes, _PIECE_BYTES)]
