"""Children of `kvbus up`: output, order of ending, and what happens when the parent is killed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvbus_cli.up.plan import ProcessSpec
from kvbus_cli.up.processes import Child, ProcessSet, exit_text

SLEEPER = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def python(name: str, code: str) -> ProcessSpec:
    return ProcessSpec(name=name, group=name, command=(sys.executable, "-c", code))


async def until_up(child: Child) -> None:
    async with asyncio.timeout(20):
        while child.last_lines() != ["up"]:
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def test_children_end_stage_by_stage(tmp_path: Path) -> None:
    ended: list[str] = []
    processes = ProcessSet(tmp_path, lambda child: ended.append(child.spec.name))
    for name in ("b", "a", "c"):
        await until_up(await processes.start(python(name, SLEEPER)))
    assert await processes.stop(["c", "a", "b"], grace_s=20) == []
    assert ended == ["c", "a", "b"]
    assert [c.exit_status for c in processes.children] == [-signal.SIGTERM] * 3


async def test_a_child_that_ignores_sigterm_is_killed_and_reported(tmp_path: Path) -> None:
    processes = ProcessSet(tmp_path, lambda child: None)
    child = await processes.start(python("stubborn", STUBBORN))
    await until_up(child)
    assert await processes.stop(["stubborn"], grace_s=0.05) == [child]
    assert exit_text(child.exit_status) == "killed by SIGKILL"


async def test_the_last_lines_of_a_dead_child_and_its_status_are_known(tmp_path: Path) -> None:
    ended = asyncio.Event()
    processes = ProcessSet(tmp_path, lambda child: ended.set())
    child = await processes.start(python("dying", "for i in range(50): print(i)\nraise SystemExit(3)"))
    await asyncio.wait_for(ended.wait(), 20)
    assert child.last_lines(2) == ["48", "49"]
    assert exit_text(child.exit_status) == "exit status 3"
    await processes.stop([], grace_s=1)


_PARENT = f"""
import asyncio, pathlib, sys
from kvbus_cli.up.plan import ProcessSpec
from kvbus_cli.up.processes import ProcessSet
async def main():
    processes = ProcessSet(pathlib.Path(sys.argv[1]), lambda child: None)
    child = await processes.start(ProcessSpec(name="c", group="c", command=(sys.executable, "-c", {SLEEPER!r})))
    while child.last_lines() != ["up"]:
        await asyncio.sleep(0.01)
    print(child.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_children_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while is_alive(pid):
        if time.monotonic() > deadline:
            pytest.fail("the child outlived its parent")
        time.sleep(0.01)
