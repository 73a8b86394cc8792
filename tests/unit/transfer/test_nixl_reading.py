"""Reads through a channel whose agent says what the test wants; no byte is moved."""

import weakref
from collections.abc import AsyncIterator, Iterator
from itertools import chain, repeat
from typing import Any

import pytest

from kvbus_transfer.backends.copy_threads import CopyThreads
from kvbus_transfer.backends.nixl_channel import HOST, Channel, ChannelFailed
from kvbus_transfer.backends.nixl_reading import Reading, batches, carry_out

MIB = 1 << 20
PIECES = [(0, 1 << 40, 24 * MIB)]
"""Three transfers."""


class Agent:
    """Each transfer has a script of states: the first is what posting it says, each later one what asking says."""

    def __init__(self, *scripts: list[str]) -> None:
        self._scripts = [chain(script, repeat(script[-1])) for script in scripts]
        self._begun = 0
        self._states: dict[int, Iterator[str]] = {}
        self.ended: list[int] = []
        self.let_go: list[int] = []

    def register_memory(self, *_: Any) -> int:
        return 0

    def add_remote_agent(self, _: bytes) -> bytes:
        return b"owner"

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], _: str) -> list[tuple[int, int, int]]:
        return descs

    def initialize_xfer(self, _operation: str, here: list[tuple[int, int, int]], *_: Any) -> int:
        handle, self._begun = self._begun, self._begun + 1
        is_entry = here[0][1] == 8
        self._states[handle] = repeat("DONE") if is_entry else self._scripts[handle]
        return handle

    def transfer(self, handle: int) -> str:
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: int) -> str:
        state = next(self._states[handle])
        if state != "PROC" and handle not in self.ended:
            self.ended.append(handle)
        return state

    def release_xfer_handle(self, handle: int) -> None:
        self.let_go.append(handle)

    def deregister_memory(self, *_: Any) -> None:
        pass


async def nobody() -> None:
    pass


@pytest.fixture(params=["on the loop", "in threads"])
async def threads(request: pytest.FixtureRequest) -> AsyncIterator[CopyThreads | None]:
    if request.param == "on the loop":
        yield None
        return
    threads = CopyThreads("test", 1)
    yield threads
    await threads.stop()


def read(agent: Agent) -> tuple[Channel, Reading]:
    channel = Channel(agent)
    return channel, Reading(channel, b"metadata", PIECES, 0, (HOST, HOST))


def test_much_is_posted_in_pieces_of_8_mib() -> None:
    found = batches([(0, 100, 5 * MIB), (5 * MIB, 1 << 30, 19 * MIB)])
    assert [sum(length for _, _, length in batch) for batch in found] == [8 * MIB, 8 * MIB, 8 * MIB]
    assert found[0] == [(0, 100, 5 * MIB), (5 * MIB, 1 << 30, 3 * MIB)]


async def test_all_that_was_posted_ends_before_the_read_does(threads: CopyThreads | None) -> None:
    agent = Agent(["PROC", "PROC", "DONE"], ["DONE"], ["PROC", "DONE"])
    _, reading = read(agent)
    await carry_out(reading, threads, nobody)
    assert sorted(agent.ended) == [0, 1, 2, 3], "the entry, too"
    assert agent.ended[-1] == 3, "after the others"
    assert sorted(agent.let_go) == [0, 1, 2]


async def test_after_an_error_of_one_transfer_the_others_are_waited_for(threads: CopyThreads | None) -> None:
    agent = Agent(["PROC", "ERR"], ["PROC"] * 40 + ["DONE"], ["PROC"] * 20 + ["ERR"])
    _, reading = read(agent)
    with pytest.raises(ChannelFailed):
        await carry_out(reading, threads, nobody)
    assert sorted(agent.ended) == [0, 1, 2]
    assert sorted(agent.let_go) == [0, 1, 2]


async def test_an_agent_whose_transfer_does_not_end_is_destroyed_with_the_read(threads: CopyThreads | None) -> None:
    agent = Agent(["PROC", "ERR"], ["PROC"], ["DONE"])
    gone = weakref.ref(agent)
    channel, reading = read(agent)
    del agent
    with pytest.raises(ChannelFailed):
        await carry_out(reading, threads, nobody)
    assert channel.is_broken
    assert gone() is None, "what could still write to the targets"
