"""`kvbus trace record FILE`: listens on the bus until it is told to stop, and writes what passed as a trace."""

import asyncio
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Annotated

from kvbus_replay.trace.agent_format import encode_line
from kvbus_replay.trace.recording import Recorder, RecordingLimits
from kvbus_runtime import log as logs
from kvbus_runtime.bus import Bus, open_bus
from kvbus_runtime.discovery import Directory
from kvbus_runtime.errors import RequestFailed, UnsupportedServer
from kvbus_runtime.event_log import EventLog
from kvbus_runtime.jetstream import JetStreamRefused
from kvbus_runtime.settings import BadSettings, CommonSettings, Flag, parse_settings
from kvbus_runtime.tasks import first_cause
from kvbus_wire.kv_events import decode_events
from kvbus_wire.message import DecodeFailed
from kvbus_wire.router import Decision, Progress

SECRET_BYTES = 32
WRITE_INTERVAL_S = 0.5


class RecordSettings(CommonSettings, frozen=True, kw_only=True):
    """Where the bus is, and what to record."""

    model: Annotated[str, Flag("the model (empty: the only one there is)", metavar="NAME")] = ""
    duration_s: Annotated[float, Flag("stop after this time (0: when interrupted)")] = 0.0
    calls: Annotated[int, Flag("stop after so many finished calls (0: when interrupted)", metavar="N")] = 0
    force: Annotated[bool, Flag("write over a file that is there")] = False
    settle_s: Annotated[float, Flag("how long after its end a call waits for the events of its blocks")] = 1.0
    connect_timeout_s: Annotated[float, Flag("how long to wait for the bus")] = 5.0
    log_level: Annotated[str, Flag("least severity logged", choices=("debug", "info", "warning", "error"))] = "warning"


class _NoModel(Exception):
    """The text is for the person at the terminal."""


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0].startswith("-"):
        wants_help = bool(argv) and argv[0] in ("-h", "--help")
        print("usage: kvbus trace record FILE [flags]", file=sys.stdout if wants_help else sys.stderr)
        if not wants_help:
            return 2
        argv = ["", *argv]
    settings = parse_settings(
        RecordSettings,
        service="replay",
        prog="kvbus trace record FILE",
        description="Write a trace of live traffic, for kvbus replay: lengths, times and block hashes; no text, no tokens.",
        argv=list(argv[1:]),
    )
    logs.configure(settings.log_level, settings.log_format)
    path = Path(argv[0])
    if path.is_file() and not settings.force:
        print(f"kvbus trace record: {path} is there already; --force writes over it", file=sys.stderr)
        return 2
    try:
        return asyncio.run(_run(settings, path))
    except Exception as problem:
        # What a task of the bus raised arrives in an exception group.
        cause = first_cause(problem)
        known = (BadSettings, JetStreamRefused, OSError, RequestFailed, TimeoutError, UnsupportedServer, _NoModel)
        if not isinstance(cause, known):
            raise
        print(f"kvbus trace record: {str(cause) or f'no bus at {settings.nats_shown}'}", file=sys.stderr)
        return 1


async def _run(settings: RecordSettings, path: Path) -> int:
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    async with open_bus(settings, name="kvbus-trace", connect_timeout_s=settings.connect_timeout_s) as bus:
        model, block_size = await _model(bus, settings.model)
        limits = RecordingLimits(settle_s=settings.settle_s)
        recorder = Recorder(model, block_size, secrets.token_bytes(SECRET_BYTES), limits)
        with path.open("wb") as file:
            print(f"recording {model} to {path}, until {_end(settings)}", file=sys.stderr, flush=True)
            file.write(encode_line(recorder.header) + b"\n")
            await _listen(bus, recorder, file, settings, over)
            _write(file, recorder, float("inf"))
        counts = recorder.counts
        print(
            f"{path}: {counts.calls} calls; {counts.unfinished} without an end and {counts.without_keys} without keys left out"
        )
    return 0


def _end(settings: RecordSettings) -> str:
    limits = [f"{settings.calls} calls have ended"] if settings.calls > 0 else []
    limits += [f"{settings.duration_s:g} s are over"] if settings.duration_s > 0 else []
    return " or ".join([*limits, "Ctrl-C"])


async def _model(bus: Bus, wanted: str) -> tuple[str, int]:
    """Name and block size of the model. Raise _NoModel when it is not there, or not clear which."""
    directory = Directory(bus, bus.settings.lease_ttl_s)
    await directory.start()
    records = directory.instances("worker")
    await directory.stop()
    models = {
        record.worker.model.name: record.worker.model.block_size for record in records if record.worker is not None
    }
    if wanted and wanted not in models:
        raise _NoModel(f"no worker has the model {wanted}: there are {', '.join(models) or 'none'}")
    if not wanted and len(models) != 1:
        raise _NoModel(f"which --model? There are {', '.join(models)}" if models else "there is no worker")
    name = wanted or next(iter(models))
    return name, models[name]


async def _listen(bus: Bus, recorder: Recorder, file: IO[bytes], settings: RecordSettings, over: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()

    def elapsed_s() -> float:
        return loop.time() - began

    def on_event(subject: str, data: bytes, headers: Mapping[str, str], stream_seq: int) -> None:
        try:
            recorder.stored(decode_events(data, headers.get("Content-Type", "")))
        except DecodeFailed as problem:
            print(f"kvbus trace record: message {stream_seq} on {subject}: {problem}", file=sys.stderr)

    events = await (await EventLog.open(bus)).follow(bus.subjects.kv_events("*", "*"), on_event, from_seq=0)
    subscriptions = [
        await bus.subscribe(
            bus.subjects.decisions("*"), [Decision], lambda message: recorder.placed(message, elapsed_s())
        ),
        await bus.subscribe(
            bus.subjects.progress("*"), [Progress], lambda message: recorder.progress(message, elapsed_s())
        ),
    ]
    while not over.is_set():
        try:
            async with asyncio.timeout(WRITE_INTERVAL_S):
                await over.wait()
        except TimeoutError:
            pass
        _write(file, recorder, elapsed_s())
        enough = 0 < settings.calls <= recorder.counts.calls
        if enough or 0 < settings.duration_s <= elapsed_s():
            over.set()
    for subscription in subscriptions:
        await subscription.stop()
    await events.stop()


def _write(file: IO[bytes], recorder: Recorder, now_s: float) -> None:
    lines = recorder.take_all() if now_s == float("inf") else recorder.take(now_s)
    for line in lines:
        file.write(encode_line(line) + b"\n")
    file.flush()
