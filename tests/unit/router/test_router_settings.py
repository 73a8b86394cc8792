from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvbus_router import cli
from kvbus_router.adapters import policies
from kvbus_router.core.estimate import Estimate
from kvbus_router.core.policies import BUILT_IN
from kvbus_router.settings import RouterSettings
from kvbus_runtime.settings import BadSettings, parse_settings


class FirstPolicy:
    """What another distribution might bring."""

    name = "first"

    def choose(self, estimates: Sequence[Estimate], rng: Random) -> Estimate:
        return estimates[0]


class Nameless:
    """It has no name, and cannot choose."""


class Broken:
    def __init__(self) -> None:
        raise RuntimeError("no licence")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint(name=name, value=f"{__name__}:{name}", group=policies.ENTRY_POINTS)
        for name in ("FirstPolicy", "Broken", "Nameless")
    ]
    objects = {"FirstPolicy": FirstPolicy, "Broken": Broken, "Nameless": Nameless}
    monkeypatch.setattr(EntryPoint, "load", lambda self: objects[self.name])
    monkeypatch.setattr(policies, "entry_points", lambda group: points if group == policies.ENTRY_POINTS else [])


@pytest.mark.usefixtures("installed")
def test_another_distribution_can_bring_a_policy() -> None:
    assert policies.make_policy("FirstPolicy").name == "first"


@pytest.mark.usefixtures("installed")
def test_a_policy_that_cannot_be_made_says_why() -> None:
    with pytest.raises(BadSettings, match="no licence"):
        policies.make_policy("Broken")
    with pytest.raises(BadSettings, match="name"):
        policies.make_policy("Nameless")


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_policy_is_found_by_its_name(name: str) -> None:
    assert policies.make_policy(name).name == name


def test_an_unknown_policy_ends_the_program_before_any_connection(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--policy", "nope", "--nats", "nats://127.0.0.1:1"]) == 2
    assert "unknown policy 'nope': there are kv, round-robin" in capsys.readouterr().err


def test_settings_become_the_limits_of_the_core() -> None:
    settings = parse_settings(
        RouterSettings,
        service="router",
        description="",
        argv=["--max-queued", "7"],
        env={"KVBUS_ROUTER_WORK_WEIGHT": "0.5"},
    )
    assert settings.limits.max_queued == 7
    assert settings.weights.work_weight == 0.5


@pytest.mark.parametrize(
    "flags", [["--max-queued", "0"], ["--overdue-s", "-1"], ["--max-queued", "10", "--max-pending-requests", "10"]]
)
def test_limits_that_make_no_sense_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_settings(RouterSettings, service="router", description="", argv=flags, env={})
    assert end.value.code == 2


def test_a_bad_file_of_policy_classes_ends_the_program_before_any_connection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "classes.toml"
    file.write_text('[[class]]\nname = "a"\nweigth = 2\n')
    assert cli.main(["--policy-classes", str(file), "--nats", "nats://127.0.0.1:1"]) == 2
    assert "weigth" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["fair_quantum_tokens", "max_tenants", "policy_classes_poll_s", "overdue_s"])
def test_what_must_not_be_zero_says_so(name: str) -> None:
    zero: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=name):
        RouterSettings(**zero)
    assert RouterSettings(follow_wait_s=0).limits.follow_wait_s == 0
