"""`kvbus events`: connects, follows, prints."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

from kvbus_cli.events.lines import KINDS, TIERS, Rates, Selection, as_json, as_text, rates_text, selected
from kvbus_cli.running import bus_hint
from kvbus_runtime import log as logs
from kvbus_runtime.bus import open_bus
from kvbus_runtime.errors import BusUnreachable, RequestFailed, UnsupportedServer
from kvbus_runtime.event_log import EventLog
from kvbus_runtime.jetstream import JetStreamRefused
from kvbus_runtime.settings import BadSettings, CommonSettings, Flag, parse_settings
from kvbus_runtime.tasks import first_cause
from kvbus_wire.kv_events import decode_events
from kvbus_wire.message import DecodeFailed

RATE_INTERVAL_S = 1.0


class EventsSettings(CommonSettings, frozen=True, kw_only=True):
    """Empty selections take everything."""

    worker: Annotated[str, Flag("only this instance (worker or kvbm)", metavar="ID")] = ""
    model: Annotated[str, Flag("only this model", metavar="NAME")] = ""
    kind: Annotated[str, Flag("only this kind of event", choices=("", *KINDS))] = ""
    tier: Annotated[str, Flag("only this tier", choices=("", *TIERS))] = ""
    from_: Annotated[str, Flag("all that the stream still holds first, or new events only", choices=("all", "new"))] = (
        "new"
    )
    follow: Annotated[bool, Flag("go on with new events (--no-follow: end when the stream has been read)")] = True
    json: Annotated[bool, Flag("one JSON object per line, with all keys")] = False
    rates: Annotated[bool, Flag("events and blocks per second instead of each event (with --no-follow: how many)")] = (
        False
    )
    connect_timeout_s: Annotated[float, Flag("how long to wait for the bus")] = 5.0
    log_level: Annotated[str, Flag("least severity logged", choices=("debug", "info", "warning", "error"))] = "error"

    @property
    def selection(self) -> Selection:
        return Selection(worker=self.worker, model=self.model, kind=self.kind, tier=self.tier)


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(
        EventsSettings,
        service="events",
        description="Follow the KV events of all workers and kvbm instances, in either encoding.",
        argv=argv,
    )
    logs.configure(settings.log_level, settings.log_format)
    try:
        return asyncio.run(_run(settings))
    except Exception as problem:
        # What a task of the bus raised arrives in an exception group.
        cause = first_cause(problem)
        if not isinstance(cause, (BadSettings, JetStreamRefused, RequestFailed, TimeoutError, UnsupportedServer)):
            raise
        hint = bus_hint(settings) if isinstance(cause, BusUnreachable) and not cause.refused else ""
        print(f"kvbus events: {str(cause) or f'no bus at {settings.nats_shown}'}{hint}", file=sys.stderr)
        return 2 if isinstance(cause, BadSettings) else 1


class Output:
    """Prints events, or counts them until `print_rates`. ``nobody_reads`` is called when the output has been closed."""

    def __init__(self, settings: EventsSettings, nobody_reads: Callable[[], None]) -> None:
        self._settings = settings
        self._selection = settings.selection
        self._format: Callable[..., str] = as_json if settings.json else as_text
        self._rates = Rates()
        self._nobody_reads = nobody_reads
        self.bad_messages = 0

    def on_message(self, subject: str, data: bytes, headers: Mapping[str, str], stream_seq: int) -> None:
        try:
            batch = decode_events(data, headers.get("Content-Type", ""))
        except DecodeFailed as problem:
            self.bad_messages += 1
            print(f"kvbus events: message {stream_seq} on {subject} cannot be read: {problem}", file=sys.stderr)
            return
        for event in selected(batch, self._selection):
            if self._settings.rates:
                self._rates.add(event)
            else:
                self._print(self._format(event))

    def print_rates(self, seconds: float) -> None:
        """Nothing when nothing was counted."""
        rows = self._rates.take(max(seconds, 1e-3)) if self._settings.follow else self._rates.take_counts()
        if rows and self._settings.json:
            import msgspec

            self._print(msgspec.json.encode(rows).decode())
        elif rows:
            self._print(rates_text(rows) + "\n")

    def _print(self, text: str) -> None:
        try:
            print(text, flush=self._settings.follow)
        except BrokenPipeError:
            # As `events | head` leaves it. What is buffered must not fail again when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self._nobody_reads()


async def _run(settings: EventsSettings) -> int:
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    output = Output(settings, nobody_reads=over.set)
    async with open_bus(settings, name="kvbus-events", connect_timeout_s=settings.connect_timeout_s) as bus:
        log = await EventLog.open(bus)
        subject = bus.subjects.kv_events(settings.model or "*", settings.worker or "*")
        subscription = await log.follow(
            subject,
            output.on_message,
            from_seq=None if settings.from_ == "all" else 0,
            on_caught_up=None if settings.follow else over.set,
        )
        begun = loop.time()
        while not over.is_set():
            await _wait(over, RATE_INTERVAL_S if settings.rates and settings.follow else None)
            output.print_rates(loop.time() - begun)
            begun = loop.time()
        output.print_rates(loop.time() - begun)
        await subscription.stop()
    return 1 if output.bad_messages else 0


async def _wait(event: asyncio.Event, timeout_s: float | None) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
