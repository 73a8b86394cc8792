"""The embedded nats-server of `kvbus up`."""

import asyncio
import shutil
from pathlib import Path

from kvbus_cli.up.plan import ProcessSpec
from kvbus_cli.up.processes import Child, ProcessSet
from kvbus_runtime.nats_server import ServerConfig, command, find_nats_server, read_url


def nats_spec(state_dir: Path) -> ProcessSpec:
    """Writes the configuration. What an earlier run left behind is removed: nothing on the bus outlives the processes.

    Raise NatsServerNotFound.
    """
    binary = find_nats_server()
    folder = state_dir / "nats"
    shutil.rmtree(folder, ignore_errors=True)
    ports_dir = folder / "ports"
    ports_dir.mkdir(parents=True)
    config_file = folder / "nats.conf"
    config = ServerConfig(store_dir=folder / "jetstream", port=-1, ports_dir=ports_dir)
    config_file.write_text(config.render(), encoding="utf-8")
    return ProcessSpec(name="nats", group="nats", command=tuple(command(binary, config_file)))


async def start_nats(processes: ProcessSet, state_dir: Path, timeout_s: float = 20.0) -> tuple[Child, str]:
    """The server and its URL, once it listens. Raise TimeoutError or ChildProcessError."""
    child = await processes.start(nats_spec(state_dir))
    async with asyncio.timeout(timeout_s):
        while (url := read_url(state_dir / "nats" / "ports", child.pid)) is None:
            if not child.alive:
                raise ChildProcessError("\n".join(["nats-server ended while it started:", *child.last_lines()]))
            await asyncio.sleep(0.02)
    child.ready_after_s = asyncio.get_running_loop().time() - child.started_at
    return child, url
