"""`kvbus doctor`: looks at everything that can be seen over the bus, changes nothing."""

import sys
from collections.abc import Sequence
from typing import Annotated

import msgspec
from rich.console import Console
from rich.text import Text

from kvbus_cli.asking import NotAnswered, ask_each, instances, run
from kvbus_cli.doctor.checks import EventStream, Facts, Finding, Level, findings
from kvbus_cli.services import SERVICES
from kvbus_runtime import log as logs
from kvbus_runtime.bus import Bus
from kvbus_runtime.event_log import EventLog
from kvbus_runtime.settings import CommonSettings, Flag, parse_settings
from kvbus_wire.indexer import DescribeIndex, IndexDescription

FAILED = 1
_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.PROBLEM: "red"}


class DoctorSettings(CommonSettings, frozen=True, kw_only=True):
    """Where the bus is, and the form of the answer."""

    json: Annotated[bool, Flag("for tools")] = False
    log_level: Annotated[str, Flag("least severity logged", choices=("debug", "info", "warning", "error"))] = "error"


class Report(msgspec.Struct, frozen=True):
    """What `kvbus doctor --json` prints. ``healthy``: there is no problem; warnings there may be."""

    healthy: bool
    findings: list[Finding]


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(
        DoctorSettings,
        service="cli",
        prog="kvbus doctor",
        description="Look at the bus and all that is registered on it, and say what is missing or does not fit together. "
        f"The exit status is {FAILED} when there is a problem, 0 with warnings only.",
        argv=argv,
    )
    logs.configure(settings.log_level, settings.log_format)
    try:
        told = findings(run(settings, "instance", gather))
    except NotAnswered as failure:
        told = [Finding(Level.PROBLEM, "bus", str(failure))]
    report = Report(all(finding.level is not Level.PROBLEM for finding in told), told)
    if settings.json:
        print(msgspec.json.encode(report).decode())
    else:
        _show(report)
    return 0 if report.healthy else FAILED


async def gather(bus: Bus) -> Facts:
    """Raise RequestFailed."""
    records = await instances(bus, *SERVICES)
    stream = await EventLog(bus).info()
    asked = any(record.service == "indexer" for record in records)
    return Facts(
        server=f"{bus.settings.nats}, namespace {bus.settings.namespace!r}",
        instances=records,
        stream=None
        if stream is None
        else EventStream(created=stream.created, first_seq=stream.state.first_seq, last_seq=stream.state.last_seq),
        indexers=await ask_each(bus, "indexer", bus.subjects.indexer_control, DescribeIndex(), IndexDescription)
        if asked
        else [],
    )


def _show(report: Report) -> None:
    console = Console(highlight=False, file=sys.stdout)
    width = max(len(finding.about) for finding in report.findings)
    for finding in report.findings:
        line = Text.assemble(
            (f"{finding.level.value:<9}", _STYLES[finding.level]), f"{finding.about:<{width}}  {finding.text}"
        )
        console.print(line, soft_wrap=True)
