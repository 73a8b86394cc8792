"""The terminal of `kvbus up`: one line per process while it starts, then how to use the system."""

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from kvbus_cli.up.cause import cause_of
from kvbus_cli.up.processes import Child, exit_text
from kvbus_cli.up.status import SystemStatus


def curl_line(url: str, model: str) -> str:
    content = '[{"role": "user", "content": "What is the capital of France?"}]'
    body = f'{{"model": {json.dumps(model)}, "stream": true, "temperature": 0, "messages": {content}}}'
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def program_name() -> str:
    """How to call this command again from the shell that started it."""
    if shutil.which("kvbus"):
        return "kvbus"
    beside = Path(sys.executable).with_name("kvbus")
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)


class TerminalReporter:
    """Live lines on a terminal; plain lines, one per change, elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tasks: dict[int, TaskID] = {}
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.fields[name]:<10}"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.description}"),
            console=console,
            transient=False,
        )
        self._live = console.is_terminal

    def started(self, child: Child) -> None:
        if not self._live:
            return
        if not self._tasks:
            self._progress.start()
        self._tasks[child.pid] = self._progress.add_task("starting", name=child.spec.name, total=1)

    def waits(self, child: Child, reason: str) -> None:
        task = self._tasks.get(child.pid)
        if task is not None and reason:
            self._progress.update(task, description=escape(reason))

    def ready(self, child: Child) -> None:
        seconds = child.ready_after_s or 0.0
        task = self._tasks.get(child.pid)
        if task is not None:
            self._progress.update(task, completed=1, description=f"ready, process {child.pid}")
        else:
            self._console.print(f"{child.spec.name}: ready after {seconds:.1f} s, process {child.pid}", highlight=False)

    def died(self, child: Child, *, fatal: bool) -> None:
        outlook = "ending the system" if fatal else "the others go on; nothing restarts it"
        cause = cause_of(child.last_lines(), child.spec.group)
        self._console.print(
            f"[bold red]{child.spec.name} (process {child.pid}) ended: {exit_text(child.exit_status)}; {outlook}",
            highlight=False,
            soft_wrap=True,
        )
        if cause:
            self._console.print(f"  why  {cause}", markup=False, highlight=False, soft_wrap=True)
        self._console.print(f"  log  {child.log}", markup=False, highlight=False, soft_wrap=True)

    def system_ready(self, status: SystemStatus, seconds: float) -> None:
        self._end_live()
        program = escape(program_name())
        for line in (
            "",
            f"[bold green]kvbus is ready[/] after {seconds:.1f} s: [bold]{status.url}",
            f"  bus       {status.nats_url}",
            f"  logs      {escape(status.state_dir)}/logs",
            "",
            "Try it:",
            f"  {escape(curl_line(status.url, status.models[0] if status.models else ''))}",
            f"  {program} chat --url {status.url}",
            f"  {program} events --nats {status.nats_url} --namespace {status.namespace}",
            "",
            "Ctrl-C ends everything.",
        ):
            self._console.print(line, highlight=False, soft_wrap=True)

    def stopping(self, reason: str) -> None:
        self._end_live()
        text = f"{reason}: ending everything, again to force" if reason else "ending everything"
        self._console.print(f"[yellow]{escape(text)}", highlight=False)

    def failed(self, message: str) -> None:
        self._end_live()
        self._console.print(f"[bold red]kvbus up: {escape(message)}", highlight=False, soft_wrap=True)

    def _end_live(self) -> None:
        if self._tasks:
            self._progress.stop()
            self._tasks.clear()
