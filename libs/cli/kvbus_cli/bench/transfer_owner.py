"""The other process of `kvbus bench transfer`: it owns the memory that is read. One JSON line, then it serves until stdin ends."""

import asyncio
import base64
import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import uvloop

from kvbus_transfer import Arena, TransferAgent, TransferLimits, host_memory
from kvbus_transfer.backends import nixl
from kvbus_transfer.backends.base import BackendUnavailable
from kvbus_transfer.copying import address_of
from kvbus_transfer.hosts import shm_folder

LEASE_S = 3600.0
ON_HUGE_PAGES = ("nixl", "ucx")
"""As UCX's own perf test has its memory."""


class PlainSocket(threading.Thread):
    """A blocking socket: 16 bytes ask for a piece of the memory."""

    def __init__(self, memory: memoryview) -> None:
        super().__init__(daemon=True)
        self._memory = memory
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def run(self) -> None:
        connection, _ = self._listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while asked := connection.recv(16, socket.MSG_WAITALL):
            offset, length = int.from_bytes(asked[:8], "little"), int.from_bytes(asked[8:], "little")
            connection.sendall(self._memory[offset : offset + length])


class PlainNixl(threading.Thread):
    """NIXL as its own examples use it."""

    def __init__(self, memory: memoryview) -> None:
        super().__init__(daemon=True)
        api = nixl.load()
        self._agent: Any = api.nixl_agent(
            f"plain-{os.getpid()}", api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        )
        self._agent.register_memory([(address_of(memory), memory.nbytes, 0, "")], "DRAM")
        self.told = {
            "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "address": address_of(memory),
        }
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.02):  # for the connection only: readers copy by themselves
            self._agent.get_new_notifs()

    def end(self) -> None:
        """Else the library would be torn down under it at the end of the process."""
        self._ended.set()
        self.join()


async def _main(backend: str, memory_bytes: int, block_bytes: list[int]) -> None:
    loop = asyncio.get_running_loop()
    folder = shm_folder() or Path.cwd()
    limits = TransferLimits(lease_s=LEASE_S)
    with Arena.create(folder / f"kvbus-bench-{os.getpid()}.arena", memory_bytes, 1) as arena:
        memory = arena.view(0)
        for start in range(0, memory_bytes, 1 << 20):
            memory[start : start + (1 << 20)] = bytes([start >> 20 & 255]) * (1 << 20)
        ended = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(ended), sys.stdin)
        async with TransferAgent("bench-owner", backends=[backend], limits=limits) as agent:
            if backend in ON_HUGE_PAGES:
                memory = host_memory(memory_bytes)
                memory[:] = arena.view(0)
            region = agent.register(memory if backend in ON_HUGE_PAGES else arena)
            plain = PlainSocket(memory)
            plain.start()
            told: dict[str, Any] = {"arena": str(arena.path), "port": plain.port, "unavailable": agent.unavailable}
            raw: PlainNixl | None = None
            if backend == "nixl" and not agent.unavailable:
                try:
                    raw = PlainNixl(memory)
                except BackendUnavailable:
                    told["nixl"] = None
                else:
                    raw.start()
                    told["nixl"] = raw.told
            told["grants"] = {}
            for size in block_bytes:
                blocks = [(start, size) for start in range(0, memory_bytes, size)]
                told["grants"][size] = base64.b64encode(agent.grant(region, blocks, LEASE_S).sealed).decode()
            print(json.dumps(told), flush=True)
            await ended.read()
            if raw is not None:
                await asyncio.to_thread(raw.end)
        arena.remove()


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])))
