"""What `kvbus up` starts and in which order it ends."""

from collections.abc import Callable
from itertools import count

import pytest

from kvbus_cli.up.command import options_of, parser
from kvbus_cli.up.plan import STOP_ORDER, UpOptions, ends_everything, longest_drain_s, plan, stop_stages


@pytest.fixture
def free_port() -> Callable[[], int]:
    ports = count(20000)
    return lambda: next(ports)


def argument(command: tuple[str, ...], flag: str) -> str:
    return command[len(command) - 1 - command[::-1].index(flag) + 1]


def test_one_process_per_service_and_as_many_workers_as_asked_for(free_port: Callable[[], int]) -> None:
    specs = plan(UpOptions(workers=3), nats_url="nats://n:1", python="python", free_port=free_port)
    assert [s.name for s in specs] == ["indexer", "kvbm", "worker-0", "worker-1", "worker-2", "router", "frontend"]
    assert len({s.ready_url for s in specs}) == len(specs)
    assert all(argument(s.command, "--nats") == "nats://n:1" for s in specs)


def test_one_of_several_workers_can_have_a_setting_of_its_own(free_port: Callable[[], int]) -> None:
    options = UpOptions(workers=2, overrides=(("worker", "role", "decode"), ("worker-0", "role", "prefill")))
    specs = plan(options, nats_url="nats://n:1", python="python", free_port=free_port)
    last = {spec.name: spec.command[-2:] for spec in specs if spec.group == "worker"}
    assert last == {"worker-0": ("--role", "prefill"), "worker-1": ("--role", "decode")}


def test_the_engine_and_the_model_reach_the_workers_only(free_port: Callable[[], int]) -> None:
    options = UpOptions(engine="mock", model="/m", served_model_name="name", mock_speedup=8.0, kv_blocks=77)
    for spec in plan(options, nats_url="nats://n:1", python="python", free_port=free_port):
        if spec.group == "worker":
            assert argument(spec.command, "--engine") == "mock"
            assert argument(spec.command, "--model") == "/m"
            assert argument(spec.command, "--served-model-name") == "name"
            assert argument(spec.command, "--mock-speedup") == "8.0"
            assert argument(spec.command, "--kv-blocks") == "77"
        else:
            assert "--engine" not in spec.command


def test_an_override_comes_last_and_therefore_wins(free_port: Callable[[], int]) -> None:
    options = UpOptions(overrides=(("router", "log_level", "debug"),))
    by_name = {s.name: s for s in plan(options, nats_url="nats://n:1", python="python", free_port=free_port)}
    assert argument(by_name["router"].command, "--log-level") == "debug"
    assert argument(by_name["indexer"].command, "--log-level") == "info"


def test_switches_are_overridden_by_the_words_true_and_false(free_port: Callable[[], int]) -> None:
    overrides = (("worker", "kvbm", "False"), ("frontend", "enable_streaming_tool_dispatch", "true"))
    options = UpOptions(engine="mock", overrides=overrides)
    by_name = {s.name: s for s in plan(options, nats_url="nats://n:1", python="python", free_port=free_port)}
    assert by_name["worker-0"].command[-1] == "--no-kvbm"
    assert by_name["frontend"].command[-1] == "--enable-streaming-tool-dispatch"


@pytest.mark.parametrize(
    ("flags", "overrides"),
    [
        ((), ()),
        (
            ("--reasoning-parser", "nemotron_deci", "--tool-call-parser", "qwen3_coder"),
            (("worker", "tool_call_parser", "qwen3_coder"), ("worker", "reasoning_parser", "nemotron_deci")),
        ),
        (("--dyn-tool-call-parser", "hermes"), (("worker", "tool_call_parser", "hermes"),)),
        (("--dyn-reasoning-parser=none",), (("worker", "reasoning_parser", "none"),)),
        (
            ("--enable-anthropic-api", "--no-strip-anthropic-preamble", "--enable-streaming-tool-dispatch"),
            (
                ("frontend", "enable_anthropic_api", "True"),
                ("frontend", "strip_anthropic_preamble", "False"),
                ("frontend", "enable_streaming_tool_dispatch", "True"),
            ),
        ),
        (
            ("--set", "worker.tool_call_parser=glm45", "--tool-call-parser", "hermes"),
            (("worker", "tool_call_parser", "hermes"), ("worker", "tool_call_parser", "glm45")),
        ),
    ],
)
def test_flags_of_services_are_passed_on(flags: tuple[str, ...], overrides: tuple[tuple[str, str, str], ...]) -> None:
    assert options_of(parser().parse_args(flags), "").overrides == overrides


def test_the_frontend_ends_first_and_the_bus_last() -> None:
    assert stop_stages(["nats", "worker", "frontend", "kvbm"]) == ["frontend", "worker", "kvbm", "nats"]
    assert (STOP_ORDER[0], STOP_ORDER[-1]) == ("frontend", "nats")


def test_a_dead_worker_ends_the_system_only_when_it_was_the_last_one() -> None:
    assert not ends_everything("worker", 1, keep_going=False)
    assert ends_everything("worker", 0, keep_going=False)
    assert ends_everything("router", 0, keep_going=False)


def test_with_keep_going_only_the_bus_is_indispensable() -> None:
    assert not ends_everything("router", 0, keep_going=True)
    assert ends_everything("nats", 0, keep_going=True)


def test_nothing_is_killed_before_the_longest_drain_of_any_process_is_over() -> None:
    options = UpOptions(
        drain_timeout_s=3.0,
        overrides=(
            ("frontend", "drain_timeout_s", "30"),
            ("worker", "drain-timeout-s", "x"),
            ("kvbm", "g2_bytes", "99"),
        ),
    )
    assert longest_drain_s(options) == 30.0
    assert longest_drain_s(UpOptions(drain_timeout_s=3.0)) == 3.0
