"""The files behind the pools."""

import asyncio
import grp
from pathlib import Path
from urllib.parse import quote

from kvbus_kvbm.core.errors import NoRoomForPool
from kvbus_kvbm.core.pools import Plan
from kvbus_runtime.settings import BadSettings
from kvbus_transfer import Arena, ArenaError, ArenaNoRoom, remove_stale

_PATTERN = "kvbus-*.arena"
_MAX_NAME_BYTES = 255


class Arenas:
    """Makes and removes arena files, in threads: reserving memory takes a second per few GB."""

    def __init__(self, directory: str, namespace: str, instance_id: str, group: str) -> None:
        """Raise BadSettings for a directory or a group that does not exist."""
        self._directory, self._group = check_place(directory, group)
        self._prefix = f"kvbus-{quote(namespace, safe='')}-{quote(instance_id, safe='')}"
        self._arenas: dict[str, Arena] = {}
        self._closed = False

    def path(self, pool_id: str) -> Path:
        suffix = f"-{pool_id}.arena"
        # The pool's id alone makes the name unique, so a long namespace may be cut.
        return self._directory / (self._prefix[: _MAX_NAME_BYTES - len(suffix)] + suffix)

    async def sweep(self) -> list[Path]:
        """Remove the files that dead instances of any namespace have left behind."""
        return await asyncio.to_thread(remove_stale, self._directory, _PATTERN)

    async def create(self, plan: Plan) -> str:
        """Make the arena of a planned pool and return its path. Raise NoRoomForPool."""
        try:
            return await asyncio.to_thread(self._create, plan)
        except ArenaNoRoom as error:
            raise NoRoomForPool(
                f"{self._directory} has no room for {plan.size_bytes} bytes: lower g2_bytes, set another arena_dir, or give the "
                f"container more shared memory",
                wanted_bytes=plan.size_bytes,
            ) from error
        except ArenaError as error:
            raise NoRoomForPool(str(error), wanted_bytes=plan.size_bytes) from error

    def _create(self, plan: Plan) -> str:
        arena = Arena.create(self.path(plan.pool_id), plan.spec.slot_bytes, plan.slots, group=self._group)
        self._arenas[plan.pool_id] = arena
        if self._closed:  # meanwhile, and the waiting task was cancelled
            arena.remove()
        return str(arena.path)

    def view(self, pool_id: str, slot: int, size_bytes: int) -> memoryview:
        """The bytes of a block. Raise KeyError, ArenaError: the pool is gone."""
        return self._arenas[pool_id].view(slot)[:size_bytes]

    async def remove(self, pool_id: str) -> None:
        arena = self._arenas.pop(pool_id, None)
        if arena is not None:
            await asyncio.to_thread(arena.remove)

    async def close(self) -> None:
        """Remove all files. Idempotent."""
        self._closed = True
        for pool_id in list(self._arenas):
            await self.remove(pool_id)


def check_place(directory: str, group: str) -> tuple[Path, int | None]:
    """The directory, and the id of the group given by name or number (None for the empty text). Raise BadSettings."""
    if not Path(directory).is_dir():
        raise BadSettings(f"arena_dir: {directory} is no directory")
    return Path(directory), _group_id(group)


def _group_id(group: str) -> int | None:
    if not group:
        return None
    if group.isdecimal():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise BadSettings(f"arena_group: there is no group {group}") from None
