"""`kvbus doctor`: looks at everything that can be seen over the bus, changes nothing."""

import asyncio
import sys
from collections.abc import Callable, Sequence

import msgspec
from rich.console import Console
from rich.text import Text

from kvbus_cli.asking import NotAnswered, Reply, ask_each, instances, run
from kvbus_cli.doctor.checks import EventStream, Facts, Finding, Level, findings
from kvbus_cli.services import SERVICES
from kvbus_cli.tool import FAILED, ToolSettings, print_json, tool_settings
from kvbus_runtime.bus import Bus
from kvbus_runtime.event_log import EventLog
from kvbus_transfer.backends.choice import missing_here
from kvbus_wire.indexer import DescribeIndex, IndexDescription
from kvbus_wire.message import Message
from kvbus_wire.router import GetLimits, RouterLimits

_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.PROBLEM: "red"}


class Report(msgspec.Struct, frozen=True):
    """What `kvbus doctor --json` prints. ``healthy``: there is no problem; warnings there may be."""

    healthy: bool
    findings: list[Finding]


def main(argv: Sequence[str]) -> int:
    settings = tool_settings(
        ToolSettings,
        "doctor",
        "Look at the bus and all that is registered on it, and say what is missing or does not fit together. "
        f"The exit status is {FAILED} when there is a problem, 0 with warnings only.",
        argv,
    )
    try:
        told = findings(run(settings, "instance", gather))
    except NotAnswered as failure:
        told = [Finding(Level.PROBLEM, "bus", str(failure))]
    report = Report(all(finding.level is not Level.PROBLEM for finding in told), told)
    if settings.json:
        print_json(report)
    else:
        _show(report)
    return 0 if report.healthy else FAILED


async def gather(bus: Bus) -> Facts:
    """Raise RequestFailed."""
    records = await instances(bus, *SERVICES)
    stream = await EventLog(bus).info()
    subjects = bus.subjects

    async def ask(service: str, subject: Callable[[str], str], question: Message, reply: type[Message]) -> list[Reply]:
        there_is_one = any(record.service == service for record in records)
        return await ask_each(bus, service, subject, question, reply) if there_is_one else []

    return Facts(
        server=f"{bus.settings.nats_shown}, namespace {bus.settings.namespace!r}",
        instances=records,
        stream=None
        if stream is None
        else EventStream(created=stream.created, first_seq=stream.state.first_seq, last_seq=stream.state.last_seq),
        indexers=await ask("indexer", subjects.indexer_control, DescribeIndex(), IndexDescription),
        routers=await ask("router", subjects.router_control, GetLimits(), RouterLimits),
        transfer=await asyncio.to_thread(missing_here),
    )


def _show(report: Report) -> None:
    console = Console(highlight=False, file=sys.stdout)
    width = max(len(finding.about) for finding in report.findings)
    for finding in report.findings:
        line = Text.assemble(
            (f"{finding.level.value:<9}", _STYLES[finding.level]), f"{finding.about:<{width}}  {finding.text}"
        )
        console.print(line, soft_wrap=True)
