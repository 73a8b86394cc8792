"""kvbm and workers as processes of one or several hosts."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvbus_testkit.kvbm import STREAM_BYTES, ByHand
from kvbus_testkit.processes import ServiceProcess
from kvbus_testkit.timing import eventually
from kvbus_wire.packing import unpack_keys

BLOCK = 16


class KvbmHost:
    """``wrap``: the beginning of each command line, which puts the processes somewhere (a network namespace)."""

    def __init__(
        self,
        stack: ExitStack,
        nats_url: str,
        namespace: str,
        folder: Path,
        model: Path,
        *,
        engine: str = "torch",
        host_id: str = "host-1",
        wrap: Sequence[str] = (),
    ) -> None:
        self._stack = stack
        self._folder = folder
        self._model = model
        self._engine = engine
        self._wrap = wrap
        self._common = {
            "--nats": nats_url,
            "--namespace": namespace,
            "--host-id": host_id,
            "--lease-ttl-s": "2",
            "--kv-stream-max-bytes": str(STREAM_BYTES),
        }
        self.kvbm_id = f"kvbm-of-{host_id}"

    def kvbm(self, **flags: str) -> ServiceProcess:
        values = {"arena_dir": str(self._folder), "g2_bytes": str(64 << 20), **flags}
        return self._start("kvbus_kvbm", instance_id=self.kvbm_id, **values)

    def worker(self, instance_id: str) -> ServiceProcess:
        return self._start(
            "kvbus_worker",
            instance_id=instance_id,
            engine=self._engine,
            model=str(self._model),
            served_model_name="tiny",
            kv_blocks="320",
            threads="1",
        )

    def _start(self, module: str, **flags: str) -> ServiceProcess:
        pairs = {**self._common, **{"--" + name.replace("_", "-"): value for name, value in flags.items()}}
        arguments = [word for pair in pairs.items() for word in pair]
        return self._stack.enter_context(ServiceProcess(module, arguments, wrap=self._wrap))


async def until_in_tier(watch: ByHand, tier: str, blocks: int) -> None:
    """Return when kvbm has so many blocks in a tier."""

    async def is_there() -> Any:
        chunks = await watch.snapshot()
        chains = [chain for chunk in chunks if chunk.tier == tier for chain in chunk.chains]
        return len([key for chain in chains for key in unpack_keys(chain.keys)]) >= blocks

    await eventually(is_there, what=f"{blocks} blocks in {tier}")
