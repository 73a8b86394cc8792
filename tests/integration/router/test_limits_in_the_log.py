"""What routers log of limits that change at run time."""

from typing import Any
from unittest.mock import MagicMock

import pytest

from kvbus_testkit.timing import eventually
from kvbus_wire.router import RouterLimits, SetLimits, WorkerLimits


async def test_changed_limits_are_logged_as_fields(cluster: Any, app_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running, client = await cluster.router(), await cluster.client()
    log = MagicMock()
    monkeypatch.setattr(app_of(running)._limits, "_log", log)
    asked = SetLimits(limits=WorkerLimits(busy_waiting_tokens=500), cordon=("w1",))
    await client.bus.request(client.bus.subjects.routers_control, asked, RouterLimits, timeout_s=20.0)
    await eventually(lambda: running.service.metrics.value("cordoned_workers") == 1)
    assert log.info.call_args.args == ("limits_changed",)
    limits = log.info.call_args.kwargs["limits"]
    assert (limits["busy_waiting_tokens"], list(limits["cordoned"])) == (500, ["w1"])
