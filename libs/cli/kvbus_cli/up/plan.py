"""What `kvbus up` starts, with which arguments, and in which order it ends. Pure: ports and paths are passed in."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

STOP_ORDER = ("frontend", "router", "worker", "kvbm", "indexer", "nats")
"""Each stage is gone before the next one is asked to go: no stage loses what it still needs to finish its work."""

SERVICES = ("indexer", "kvbm", "worker", "router", "frontend")
"""In the order in which each finds what it waits for."""


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``overrides``: (service or process, setting, value), put at the end of its arguments, where they win. The values true and
    false are those of switches."""

    http_host: str = "127.0.0.1"
    http_port: int = 8000
    engine: str = "torch"
    workers: int = 2
    model: str = ""
    served_model_name: str = ""
    mock_speedup: float | None = None
    kv_blocks: int | None = None
    namespace: str = "default"
    log_level: str = "info"
    drain_timeout_s: float = 3.0
    overrides: tuple[tuple[str, str, str], ...] = ()


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process. ``ready_url`` answers 200 when it is ready; ``group``: processes that stand in for each other."""

    name: str
    group: str
    command: tuple[str, ...]
    ready_url: str = ""
    env: Mapping[str, str] = {}


def plan(options: UpOptions, *, nats_url: str, python: str, free_port: Callable[[], int]) -> list[ProcessSpec]:
    """The services in starting order. Their instance ids are their process names."""
    specs = []
    for service in SERVICES:
        count = options.workers if service == "worker" else 1
        for number in range(count):
            name = f"{service}-{number}" if count > 1 else service
            specs.append(_spec(options, service, name, nats_url=nats_url, python=python, free_port=free_port))
    return specs


def _spec(
    options: UpOptions, service: str, name: str, *, nats_url: str, python: str, free_port: Callable[[], int]
) -> ProcessSpec:
    health_port = free_port()
    arguments = [
        *("--nats", nats_url),
        *("--namespace", options.namespace),
        *("--instance-id", name),
        *("--health-host", "127.0.0.1"),
        *("--health-port", str(health_port)),
        *("--log-level", options.log_level),
        *("--drain-timeout-s", str(options.drain_timeout_s)),
        *_own_arguments(options, service),
    ]
    for owner, flag, value in options.overrides:
        if owner in (service, name):
            arguments += _flag(flag.replace("_", "-"), value)
    return ProcessSpec(
        name=name,
        group=service,
        command=(python, "-m", f"kvbus_{service}", *arguments),
        ready_url=f"http://127.0.0.1:{health_port}/readyz",
        env=_environment(options, service),
    )


def _flag(name: str, value: str) -> list[str]:
    match value.lower():
        case "true":
            return [f"--{name}"]
        case "false":
            return [f"--no-{name}"]
        case _:
            return [f"--{name}", value]


def _own_arguments(options: UpOptions, service: str) -> list[str]:
    if service == "frontend":
        return ["--http-host", options.http_host, "--http-port", str(options.http_port)]
    if service != "worker":
        return []
    arguments = ["--engine", options.engine]
    if options.model:
        arguments += ["--model", options.model]
    if options.served_model_name:
        arguments += ["--served-model-name", options.served_model_name]
    if options.mock_speedup is not None:
        arguments += ["--mock-speedup", str(options.mock_speedup)]
    if options.kv_blocks is not None:
        arguments += ["--kv-blocks", str(options.kv_blocks)]
    return arguments


def _environment(options: UpOptions, service: str) -> dict[str, str]:
    # Engines of one machine that each start a thread per core wait for each other more than they compute: one thread per worker.
    return {"OMP_NUM_THREADS": "1"} if service == "worker" and options.engine == "torch" and options.workers > 1 else {}


def longest_drain_s(options: UpOptions) -> float:
    """How long any of the processes may go on with what is in flight. Values that are no numbers are the services' to refuse."""
    own = [value for _, name, value in options.overrides if name.replace("-", "_") == "drain_timeout_s"]
    numbers = [float(value) for value in own if value.replace(".", "", 1).isdigit()]
    return max(options.drain_timeout_s, *numbers, 0.0)


def stop_stages(groups: Sequence[str]) -> list[str]:
    """The groups in the order in which they end."""
    return [group for group in STOP_ORDER if group in groups]


def ends_everything(group: str, living_in_group: int, *, keep_going: bool) -> bool:
    """Whether the death of one process of a group ends the system: only when nothing can stand in for it.

    ``keep_going`` (for experiments with failures): only the bus is indispensable.
    """
    if group == "nats":
        return True
    return not keep_going and living_in_group == 0
