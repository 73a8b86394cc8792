"""Requests of a frontend that is gone are ended, after a grace time in which it may come back."""

import asyncio
from typing import Any

from kvbus_runtime.discovery import Directory
from kvbus_wire.records import InstanceRecord
from kvbus_worker.handlers.runner import RequestRunner


class FrontendWatch:
    def __init__(self, directory: Directory, runner: RequestRunner, *, grace_s: float, log: Any) -> None:
        self._directory = directory
        self._runner = runner
        self._grace_s = grace_s
        self._log = log
        self._timers: dict[str, asyncio.TimerHandle] = {}
        directory.on_change(self._on_change)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _on_change(self, record: InstanceRecord, change: str) -> None:
        if record.service != "frontend":
            return
        timer = self._timers.pop(record.instance_id, None)
        if timer is not None:
            timer.cancel()
        if change == "left":
            loop = asyncio.get_running_loop()
            self._timers[record.instance_id] = loop.call_later(self._grace_s, self._gone, record.instance_id)

    def _gone(self, frontend_id: str) -> None:
        self._timers.pop(frontend_id, None)
        if self._directory.get(frontend_id) is None:
            self._runner.end_frontend(frontend_id)
