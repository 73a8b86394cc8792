"""`kvbus events` against a real stream, in both encodings."""

import asyncio
import json
import subprocess
import sys

import pytest

from kvbus_runtime.bus import open_bus
from kvbus_runtime.event_log import EventLog
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.timing import scaled
from kvbus_testkit.up import run_kvbus
from kvbus_wire.kv_events import KvEvents, Removed, Stored, encode_events
from kvbus_wire.message import CONTENT_TYPE, CONTENT_TYPE_JSON

MODEL = "org/model.v1"


@pytest.fixture
async def arguments(nats_server: NatsServer, namespace: str) -> tuple[str, ...]:
    """Arguments for a stream that holds a batch of worker-0 in msgpack and one of worker-1 in JSON."""
    async with open_bus(CommonSettings(nats=nats_server.url, namespace=namespace), name="test") as bus:
        log = await EventLog.open(bus)
        for number, content_type in enumerate((CONTENT_TYPE, CONTENT_TYPE_JSON)):
            events = (Stored(parent=b"", keys=bytes([number]) * 32), Removed(keys=bytes([number]) * 16))
            batch = KvEvents(instance_id=f"worker-{number}", incarnation=1, model=MODEL, first_seq=1, events=events)
            data = encode_events(batch, as_json=content_type == CONTENT_TYPE_JSON)
            subject = bus.subjects.kv_events(MODEL, batch.instance_id)
            await log.append(subject, data, msg_id=str(number), content_type=content_type)
    return ("events", "--nats", nats_server.url, "--namespace", namespace, "--from", "all", "--no-follow")


async def test_both_encodings_give_the_same_lines(arguments: tuple[str, ...]) -> None:
    result = run_kvbus(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(e["instance_id"], e["seq"], e["kind"], len(e["keys"])) for e in events] == [
        ("worker-0", 1, "stored", 2),
        ("worker-0", 2, "removed", 1),
        ("worker-1", 1, "stored", 2),
        ("worker-1", 2, "removed", 1),
    ]


@pytest.mark.parametrize(
    ("selection", "count"),
    [
        (("--worker", "worker-1"), 2),
        (("--model", MODEL, "--kind", "removed"), 2),
        (("--model", "other"), 0),
        (("--tier", "g2"), 0),
    ],
)
async def test_a_selection_shows_what_it_names(
    arguments: tuple[str, ...], selection: tuple[str, ...], count: int
) -> None:
    result = run_kvbus(*arguments, *selection)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == count


async def test_rates_count_per_instance_and_kind(arguments: tuple[str, ...]) -> None:
    result = run_kvbus(*arguments, "--rates", "--json")
    rows = json.loads(result.stdout)
    assert {(row["events"], row["blocks"]) for row in rows} == {(1, 1), (1, 2)}
    assert [(row["instance_id"], row["kind"]) for row in rows] == [
        ("worker-0", "removed"),
        ("worker-0", "stored"),
        ("worker-1", "removed"),
        ("worker-1", "stored"),
    ]


def test_a_bus_that_is_not_there_is_an_error() -> None:
    result = run_kvbus("events", "--nats", "nats://127.0.0.1:1", "--connect-timeout-s", "0.2")
    assert result.returncode == 1
    assert "no bus at nats://127.0.0.1:1" in result.stderr


def test_an_unknown_kind_is_refused_before_any_connection() -> None:
    result = run_kvbus("events", "--kind", "moved")
    assert result.returncode == 2
    assert "kind must be one of stored, removed, cleared" in result.stderr


async def test_it_ends_quietly_when_nobody_reads_its_output_any_more(arguments: tuple[str, ...]) -> None:
    following = [part for part in arguments if part != "--no-follow"]
    process = subprocess.Popen(  # noqa: ASYNC220  (waited for in a thread)
        [sys.executable, "-m", "kvbus_cli", *following], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    try:
        _, errors = await asyncio.to_thread(process.communicate, timeout=scaled(20))
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, "")
