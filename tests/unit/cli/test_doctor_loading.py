"""What `kvbus doctor` says of workers that are loading their models."""

import msgspec

from kvbus_cli.doctor.checks import Facts, Finding, Level, findings
from kvbus_testkit.index_events import a_worker
from kvbus_wire.records import InstanceRecord


def said(*workers: InstanceRecord) -> list[Finding]:
    told = findings(Facts(server="s", instances=list(workers), stream=None, indexers=[]))
    return [finding for finding in told if finding.about == "worker" and finding.level is not Level.OK]


def test_a_worker_that_loads_is_named_and_when_all_do_that_is_a_warning() -> None:
    loading = msgspec.structs.replace(a_worker("w2"), worker=None, loading="m")
    text = "still loading, so no request goes there: w2 (m)"
    assert said(a_worker("w1")) == []
    assert said(a_worker("w1"), loading) == [Finding(Level.NOTE, "worker", text)]
    assert said(loading) == [Finding(Level.WARNING, "worker", text)]
