"""What the transfer backends are measured against, in the same run, with the same sizes and memory."""

import base64
import importlib.util
import os
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbus_transfer import Arena
from kvbus_transfer.backends import nixl
from kvbus_transfer.copying import address_of, copy_pieces

Segment = tuple[int, int]


class MemoryCopy:
    """memcpy from the owner's arena, mapped into this process."""

    def __init__(self, told: dict[str, Any], target: memoryview) -> None:
        self._arena = Arena.open(told["arena"], target.nbytes, 1)
        self._from, self._to = address_of(self._arena.view(0)), address_of(target)

    def copy(self, segments: Sequence[Segment]) -> None:
        copy_pieces([(self._to + offset, self._from + offset, length) for offset, length in segments])

    def close(self) -> None:
        self._arena.close()


class SocketCopy:
    """A blocking TCP socket, received into the target."""

    def __init__(self, told: dict[str, Any], target: memoryview) -> None:
        self._target = target
        self._socket = socket.create_connection(("127.0.0.1", told["port"]))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def copy(self, segments: Sequence[Segment]) -> None:
        start, length = segments[0][0], sum(length for _, length in segments)
        self._socket.sendall(start.to_bytes(8, "little") + length.to_bytes(8, "little"))
        self._socket.recv_into(self._target[start : start + length], length, socket.MSG_WAITALL)

    def close(self) -> None:
        self._socket.close()


class NixlCopy:
    """NIXL alone: descriptor lists, one transfer at a time, polled until it is done."""

    def __init__(self, told: dict[str, Any], target: memoryview) -> None:
        api = nixl.load()
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent: Any = api.nixl_agent(f"plain-reader-{os.getpid()}", config)
        self._to, self._from = address_of(target), told["nixl"]["address"]
        self._agent.register_memory([(self._to, target.nbytes, 0, "")], "DRAM")
        remote = self._agent.add_remote_agent(base64.b64decode(told["nixl"]["metadata"]))
        self._remote = remote.decode() if isinstance(remote, bytes) else remote

    def copy(self, segments: Sequence[Segment]) -> None:
        agent = self._agent
        here = agent.get_xfer_descs([(self._to + offset, length, 0) for offset, length in segments], "DRAM")
        there = agent.get_xfer_descs([(self._from + offset, length, 0) for offset, length in segments], "DRAM")
        handle = agent.initialize_xfer("READ", here, there, self._remote)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)

    def close(self) -> None:
        self._agent = None


class NoPerftest(Exception):
    pass


def ucx_perftest_gbps(size_bytes: int, iterations: int) -> float:
    """UCX's own `ucx_perftest`, tag_bw, between two processes over loopback or shared memory. Raise NoPerftest."""
    spec = importlib.util.find_spec("libucx")
    places = spec.submodule_search_locations if spec is not None else None
    if not places:
        raise NoPerftest("there is no libucx package")
    root = Path(next(iter(places)))
    binary = root / "bin" / "ucx_perftest"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    env = {**os.environ, "LD_LIBRARY_PATH": str(root / "lib"), "UCX_WARN_UNUSED_ENV_VARS": "n"}
    command = [str(binary), "-p", port]
    if not os.access(binary, os.X_OK):
        raise NoPerftest(f"{binary} cannot be run")
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            measure = f"127.0.0.1 -t tag_bw -s {size_bytes} -n {iterations} -w {iterations} -f"
            text = _client([*command, *measure.split()], env)
        finally:
            server.kill()
    found = re.findall(r"[\d.]+", text.strip().splitlines()[-1]) if text.strip() else []
    if len(found) < 6:
        raise NoPerftest(f"its output is not understood: {text[-200:]!r}")
    return float(found[-3]) * (1 << 20) / 1e9  # it says MB/s and means MiB/s


def _client(command: Sequence[str], env: dict[str, str]) -> str:
    """The server may not listen yet."""
    done = None
    for _ in range(50):
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout
        time.sleep(0.05)
    raise NoPerftest((done.stderr or done.stdout)[-200:] if done is not None else "")
