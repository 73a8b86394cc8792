"""Plain TCP (or TLS): the blocks follow the request on the connection to the owner. Always there; any memory."""

from collections.abc import Sequence
from typing import Any

from kvbus_transfer.backends.base import ReadJob
from kvbus_transfer.errors import BackendFailed, PeerLost
from kvbus_transfer.messages import Fetch, Fetched, Refused
from kvbus_transfer.peers import Peer
from kvbus_transfer.regions import Region
from kvbus_transfer.stream import read_all


class TcpBackend:
    name = "tcp"

    async def start(self) -> bytes:
        return b""

    async def stop(self) -> None:
        pass

    def can_serve(self, region: Region) -> bool:
        return True

    def can_reach(self, info: bytes, *, same_host: bool) -> bool:
        return True

    def add_region(self, region: Region) -> None:
        pass

    def remove_region(self, region: Region) -> None:
        pass

    async def opened(self, region: Region, payload: bytes) -> bytes:
        return b""

    async def push(self, payload: bytes, views: Sequence[Any]) -> None:
        raise BackendFailed("tcp sends on the connection that asked")

    def forget(self, peer: Peer) -> None:
        pass

    def wake(self) -> None:
        pass

    async def fetch(self, job: ReadJob) -> None:
        async with job.peer.connection() as stream:
            await stream.say(Fetch(grant=job.grant, indices=job.indices, deadline_s=job.deadline_s))
            begun = await stream.receive()
            if not isinstance(begun, Refused):
                await read_all(stream, job.targets)
                ended = await stream.receive()
                if not isinstance(ended, Fetched):
                    raise PeerLost("the blocks are not followed by what should follow", peer=job.peer.info.agent_id)
        if isinstance(begun, Refused):
            raise job.peer.error_of(begun)
