"""How a system ends: asked, forced, and when one of its processes dies."""

import json
import os
import signal
import socket
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvbus_testkit.pausing import pause
from kvbus_testkit.timing import eventually_sync
from kvbus_testkit.up import KvbusUp, is_alive

StartSystem = Callable[..., KvbusUp]
QUESTION = [{"role": "user", "content": "Say something. " * 20}]


def nothing_is_left(pids: list[int]) -> bool:
    return not any(is_alive(pid) for pid in pids)


def test_ctrl_c_ends_everything_and_leaves_nothing_behind(start_system: StartSystem) -> None:
    system = start_system()
    system.chat(QUESTION, max_tokens=8)
    pids = system.pids()
    system.interrupt()
    assert system.wait() == 0, system.output
    assert nothing_is_left(pids)
    assert [process.exit_status for process in system.status.processes if process.service != "nats"] == [0] * 6
    assert list(system.arena_dir.iterdir()) == []
    assert (system.status.state, system.status.exit_status) == ("stopped", 0)


def test_open_streams_end_with_one_error_and_a_client_that_reads_nothing_is_cut_off(start_system: StartSystem) -> None:
    system = start_system("--mock-speedup", "1")
    fields = {"model": system.model, "messages": QUESTION, "ignore_eos": True, "max_tokens": 1900, "stream": True}
    body = json.dumps({**fields, "n": 8, "logprobs": True, "top_logprobs": 20}).encode()
    with socket.socket() as silent, ThreadPoolExecutor(4) as threads:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(("127.0.0.1", system.port))
        silent.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: kvbus\r\nContent-Type: application/json\r\n")
        silent.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        streams = [threads.submit(system.stream, QUESTION, max_tokens=1900, ignore_eos=True) for _ in range(4)]
        eventually_sync(lambda: in_flight(system) == 5, what="five streams")
        system.interrupt()
        assert system.wait() == 0, system.output
        chunks = [stream.result().chunks for stream in streams]
    assert [[chunk["error"]["code"] for chunk in each if "error" in chunk] for each in chunks] == [["draining"]] * 4
    assert all("error" in each[-1] for each in chunks)


def in_flight(system: KvbusUp) -> int:
    with urllib.request.urlopen(f"{system.url}/metrics") as page:  # noqa: S310
        lines = page.read().decode().splitlines()
    return int(float(next(line.split()[-1] for line in lines if line.startswith("kvbus_frontend_requests_in_flight"))))


def test_a_second_signal_kills_what_is_left(start_system: StartSystem) -> None:
    system = start_system()
    pids = system.pids()
    # A frontend that does not run cannot end: the orderly way would wait for it.
    pause(system.processes("frontend")[0].pid)
    system.interrupt()
    eventually_sync(lambda: system.status.state == "stopping", what="stopping")
    system.interrupt()
    assert system.wait() == 1
    assert nothing_is_left(pids)


def test_a_dead_worker_is_reported_and_the_others_go_on(start_system: StartSystem) -> None:
    system = start_system()
    victim = system.processes("worker")[0]
    os.kill(victim.pid, signal.SIGKILL)
    eventually_sync(lambda: "killed by SIGKILL" in system.output, what="the report")
    assert system.process.poll() is None
    assert system.chat(QUESTION, max_tokens=8)["usage"]["completion_tokens"] > 0
    system.interrupt()
    assert system.wait() == 0, system.output


def test_a_dead_router_ends_the_system_and_its_log_is_named(start_system: StartSystem) -> None:
    system = start_system()
    pids = system.pids()
    os.kill(system.processes("router")[0].pid, signal.SIGKILL)
    assert system.wait() == 1
    assert nothing_is_left(pids)
    assert "router" in system.output
    assert "killed by SIGKILL" in system.output
    assert "router.log" in system.output


def test_nothing_outlives_a_killed_up(start_system: StartSystem) -> None:
    system = start_system()
    pids = system.pids()
    system.process.kill()
    system.wait()
    eventually_sync(lambda: nothing_is_left(pids), timeout_s=30, what="all processes gone")


def test_a_second_system_in_the_same_state_directory_is_refused(start_system: StartSystem) -> None:
    first = start_system()
    second = start_system("--state-dir", str(first.folder / "state"), wait=False)
    assert second.wait() == 1
    assert "in use by process" in second.output


def test_a_taken_port_is_refused_before_anything_starts(start_system: StartSystem) -> None:
    first = start_system()
    second = start_system("--http-port", str(first.port), wait=False)
    assert second.wait() == 2
    assert str(first.port) in second.output


def test_a_service_that_cannot_start_is_reported(start_system: StartSystem) -> None:
    system = start_system("--set", "router.policy=nonsense", wait=False)
    assert system.wait() == 1
    assert "router" in system.output
    assert "nonsense" in system.output
    assert '{"' not in system.output  # no raw log


def test_a_setting_that_its_service_refuses_ends_the_start_with_status_2(start_system: StartSystem) -> None:
    system = start_system("--set", "indexer.log_level=nonsense", wait=False)
    assert system.wait() == 2
    assert "kvbus indexer" in system.output
    assert "nonsense" in system.output
