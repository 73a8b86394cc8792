"""The channels to all peers: a few for each, made when they are wanted, each lent to one read at a time."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from kvbus_transfer.backends.nixl_channel import Channel
from kvbus_transfer.errors import BackendFailed
from kvbus_transfer.peers import Peer
from kvbus_transfer.regions import Region

CHANNELS_PER_PEER = 4
"""So that two copy while the others are looked after in Python. Each takes 5 MB and 11 file descriptors, and 30 ms to make."""
_CHANNELS_KEPT = 32
_STOPPED = "the agent has stopped, or its peer is forgotten"


class PeerChannels:
    """To one peer. Who comes first is served first."""

    def __init__(self, make: Callable[[], Awaitable[Channel]], agent_id: str) -> None:
        self._make = make
        self._agent_id = agent_id
        self.idle: list[Channel] = []
        self.lent: set[Channel] = set()
        self._making: asyncio.Task[None] | None = None
        self._waiting: deque[asyncio.Future[Channel]] = deque()
        self._generation = 0
        self._is_closed = False

    @property
    def count(self) -> int:
        return len(self.idle) + len(self.lent) + (self._making is not None)

    async def take(self) -> Channel:
        """`give` it back. Raise BackendFailed when there is none and none can be made."""
        if self._is_closed:
            raise BackendFailed(_STOPPED, peer=self._agent_id)
        if self.idle:
            return self._lend()
        turn: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._serve()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # it had its turn in the same moment
                self.give(turn.result())
            raise

    def give(self, channel: Channel) -> None:
        """One that is broken is destroyed here, and one from before `renew`, too."""
        self.lent.discard(channel)
        channel.rest()
        if channel.is_broken or channel.generation != self._generation or self._is_closed:
            channel.destroy()
        else:
            self.idle.append(channel)
        self._serve()

    def renew(self, failed: Channel) -> None:
        """What a channel knows of the peer may be what made it fail, and the others know it, too: none of them is used again."""
        failed.close()
        if failed.generation == self._generation:
            self._generation += 1
            self.close_idle()

    def add_region(self, region: Region) -> None:
        for channel in (*self.idle, *self.lent):
            channel.add_region(region)
        self.idle = [channel for channel in self.idle if not channel.is_broken]

    def remove_region(self, region: Region) -> None:
        for channel in (*self.idle, *self.lent):
            channel.remove_region(region)

    def close_idle(self) -> None:
        while self.idle:
            self.idle.pop().destroy()

    def close(self) -> "asyncio.Task[None] | None":
        """The task is still to be waited for. Those that are lent go when they are given back."""
        self._is_closed = True
        self.close_idle()
        for channel in self.lent:
            channel.close()
        self._fail(_STOPPED)
        if self._making is not None:
            self._making.cancel()
        return self._making

    def _serve(self) -> None:
        while self._waiting:
            if self._waiting[0].done():  # cancelled
                self._waiting.popleft()
            elif self.idle:
                self._waiting.popleft().set_result(self._lend())
            else:
                if self._making is None and self.count < CHANNELS_PER_PEER and not self._is_closed:
                    self._making = asyncio.get_running_loop().create_task(self._make_one(), name="kvbus-nixl-channel")
                return

    def _lend(self) -> Channel:
        channel = self.idle.pop()
        channel.in_use = True
        self.lent.add(channel)
        return channel

    async def _make_one(self) -> None:
        failure = ""
        try:
            channel = await self._make()
            channel.generation = self._generation
            self.idle.append(channel)
        except Exception as error:  # the library has exceptions of its own without a common root
            failure = f"NIXL cannot make an agent: {error}"
        finally:
            self._making = None
        if failure and not self.lent:  # else there is somebody to wait for
            self._fail(failure)
        self._serve()

    def _fail(self, why: str) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(BackendFailed(why, peer=self._agent_id))


class Channels:
    """To all peers. ``make``: a channel that has these regions registered."""

    def __init__(self, make: Callable[[Sequence[Region]], Awaitable[Channel]]) -> None:
        self._make = make
        self._peers: dict[tuple[str, int], PeerChannels] = {}
        self._regions: dict[int, Region] = {}

    def of(self, peer: Peer) -> PeerChannels:
        key = (peer.info.agent_id, peer.info.incarnation)
        found = self._peers.pop(key, None) or PeerChannels(self._make_one, peer.info.agent_id)
        self._peers[key] = found  # the last that is used is the last that is closed
        return found

    def add_region(self, region: Region) -> None:
        self._regions[region.region_id] = region
        for each in self._peers.values():
            each.add_region(region)

    def remove_region(self, region: Region) -> None:
        self._regions.pop(region.region_id, None)
        for each in self._peers.values():
            each.remove_region(region)

    def forget(self, peer: Peer) -> None:
        found = self._peers.pop((peer.info.agent_id, peer.info.incarnation), None)
        if found is not None:
            found.close()

    async def close(self) -> None:
        making = [task for each in self._peers.values() if (task := each.close()) is not None]
        self._peers.clear()
        self._regions.clear()
        if making:
            await asyncio.wait(making)

    async def _make_one(self) -> Channel:
        for each in list(self._peers.values()):
            if sum(every.count for every in self._peers.values()) <= _CHANNELS_KEPT:
                break
            each.close_idle()
        registered = dict(self._regions)
        channel = await self._make(list(registered.values()))
        for region_id, region in registered.items():  # what came and went meanwhile
            if region_id not in self._regions:
                channel.remove_region(region)
        for region_id, region in self._regions.items():
            if region_id not in registered:
                channel.add_region(region)
        return channel
