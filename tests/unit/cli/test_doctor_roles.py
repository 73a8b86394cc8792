"""What `kvbus doctor` says of the roles of workers."""

import msgspec
import pytest

from kvbus_cli.doctor.checks import Facts, Level, findings
from kvbus_testkit.index_events import a_worker
from kvbus_wire.records import InstanceRecord


def a_worker_that(role: str, name: str) -> InstanceRecord:
    record = a_worker(name)
    assert record.worker is not None
    return msgspec.structs.replace(record, worker=msgspec.structs.replace(record.worker, role=role))


@pytest.mark.parametrize(
    ("roles", "level", "said"),
    [
        (("prefill", "prefill"), Level.PROBLEM, "no request is placed"),
        (("decode", "decode"), Level.NOTE, "compute their prompts themselves"),
        (("prefill", "decode", "decode"), Level.OK, "1 prefill, 2 decode"),
        (("prefill", "both"), Level.OK, "1 prefill, 1 both"),
    ],
)
def test_a_mix_of_roles_that_cannot_work_is_a_problem(roles: tuple[str, ...], level: Level, said: str) -> None:
    workers = [a_worker_that(role, f"w{number}") for number, role in enumerate(roles)]
    told = findings(Facts(server="s", instances=workers, stream=None, indexers=[]))
    (found,) = [finding for finding in told if finding.about == "roles"]
    assert found.level is level
    assert said in found.text


def test_without_roles_nothing_is_said_of_them() -> None:
    told = findings(Facts(server="s", instances=[a_worker("w1")], stream=None, indexers=[]))
    assert not [finding for finding in told if finding.about == "roles"]
