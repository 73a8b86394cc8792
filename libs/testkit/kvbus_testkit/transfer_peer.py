"""A transfer agent in a process of its own, on this host or in another network namespace, that does what a test says.

Started by `TransferPeer`; it reads one JSON command per line and answers each with one line.
"""

import asyncio
import base64
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from kvbus_transfer import Arena, FileSegment, Region, TransferAgent, TransferError, TransferLimits


def pattern(size_bytes: int, seed: int) -> bytes:
    """What a region of this seed holds: the same in every process."""
    return random.Random(seed).randbytes(size_bytes)


class Commands:
    def __init__(self, agent: TransferAgent, ended: list[tuple[int, str]], notified: list[tuple[str, str]]) -> None:
        self._agent = agent
        self._regions: dict[int, Region] = {}
        self._arenas: list[Arena] = []
        self._folder = tempfile.TemporaryDirectory(prefix="kvbus-transfer-peer-")
        self._ended = ended
        self._notified = notified

    def close(self) -> None:
        for arena in self._arenas:
            arena.remove()
        self._folder.cleanup()

    async def run(self, command: dict[str, Any]) -> dict[str, Any]:
        name = command.pop("do")
        try:
            answer: dict[str, Any] = await getattr(self, f"do_{name}")(**command)
        except (TransferError, ValueError) as error:
            return {"error": getattr(error, "code", "value"), "detail": str(error)}
        return answer

    async def do_register(self, kind: str, size_bytes: int, seed: int, layout: str = "") -> dict[str, Any]:
        data = pattern(size_bytes, seed)
        memory: Any = bytearray(data)
        if kind == "arena":
            path = Path(f"/dev/shm/kvbus-test-{os.getpid()}-{len(self._arenas)}.arena")  # noqa: S108
            memory = Arena.create(path, size_bytes, 1)
            memory.view(0)[:] = data
            self._arenas.append(memory)
        elif kind == "file":
            path = Path(self._folder.name) / f"{len(self._regions)}.blocks"
            path.write_bytes(bytes(4096) + data)
            memory = FileSegment(path, 4096, size_bytes)
        region = self._agent.register(memory, layout=layout)
        self._regions[region.region_id] = region
        return {"region": region.region_id}

    async def do_deregister(self, region: int) -> dict[str, Any]:
        self._agent.deregister(self._regions.pop(region))
        return {}

    async def do_grant(self, region: int, segments: list[tuple[int, int]], **options: Any) -> dict[str, Any]:
        granted = self._agent.grant(self._regions[region], [(a, b) for a, b in segments], **options)
        return {"sealed": base64.b64encode(granted.sealed).decode(), "lease": granted.lease_id}

    async def do_release(self, lease: int, scramble: int | None = None) -> dict[str, Any]:
        """``scramble``: the memory of this region is used for something else at once."""
        released = self._agent.release(lease)
        if scramble is not None:
            region = self._regions[scramble]
            region.view(0, region.size_bytes)[:] = bytes(region.size_bytes)
        return {"released": released}

    async def do_bytes(self, region: int, offset: int, length: int) -> dict[str, Any]:
        return {"data": base64.b64encode(self._regions[region].view(offset, length)).decode()}

    async def do_corrupt(self, region: int, offset: int) -> dict[str, Any]:
        """Changes a byte where checksums of blocks do not look again."""
        self._regions[region].view(offset, 1)[0] ^= 1
        return {}

    async def do_state(self) -> dict[str, Any]:
        counters = self._agent.counters
        return {
            "leases": self._agent.leases(),
            "ended": self._ended,
            "notified": self._notified,
            "refused": dict(counters.refused),
            "served_bytes": dict(counters.served_bytes),
            "unavailable": self._agent.unavailable,
        }

    async def do_info(self) -> dict[str, Any]:
        return {"info": base64.b64encode(self._agent.info.encode()).decode()}


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def _main(options: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    limits = TransferLimits(**options.pop("limits", {}))
    options["secret"] = options.pop("secret", "").encode()
    ended: list[tuple[int, str]] = []
    notified: list[tuple[str, str]] = []
    agent = TransferAgent(
        **options,
        limits=limits,
        on_lease_end=lambda lease_id, how: ended.append((lease_id, how.value)),
        on_notify=lambda peer, payload: notified.append((peer, payload.decode())),
    )
    lines = asyncio.StreamReader(limit=64 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await agent.start()
    commands = Commands(agent, ended, notified)
    try:
        _say({"ready": True})
        while line := await lines.readline():
            _say(await commands.run(json.loads(line)))
    finally:
        await agent.stop()
        commands.close()


if __name__ == "__main__":
    uvloop.run(_main(json.loads(sys.argv[1])))
