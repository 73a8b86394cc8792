"""Finds a policy by its name: a built-in one, or one that another distribution brings; and tells when that fails."""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from kvbus_router.core.policies import BUILT_IN, KvPolicy, PolicyFailed, RoutingPolicy
from kvbus_runtime.log import Seldom
from kvbus_runtime.metrics import Metrics
from kvbus_runtime.settings import BadSettings

ENTRY_POINTS = "kvbus.routing_policies"


def make_policy(name: str, *, temperature_s: float = 0.0) -> RoutingPolicy:
    """``temperature_s``: of the policy ``kv``. Raise BadSettings when there is no policy of this name, or it cannot be made."""
    if name == KvPolicy.name:
        return KvPolicy(temperature_s)
    built_in = BUILT_IN.get(name)
    if built_in is not None:
        return built_in()
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        raise BadSettings(f"unknown policy {name!r}: there are {', '.join([*BUILT_IN, *sorted(found)])}")
    try:
        policy: RoutingPolicy = found[name].load()()
        if not isinstance(policy.name, str) or not callable(policy.choose):
            raise TypeError("it is no RoutingPolicy")
        return policy
    except Exception as problem:
        raise BadSettings(f"policy {name!r} ({found[name].value}) cannot be made: {problem!r}") from problem


class PolicyFailures:
    """Counts all, and logs one at a time: a policy that fails does so at each request."""

    def __init__(self, clock: Callable[[], float], metrics: Metrics, log: Any) -> None:
        self._log = log
        self._lines = Seldom(clock=clock)
        self._failures = metrics.counter("policy_failures", "choices that the routing policy could not make", ("kind",))

    def __call__(self, failure: PolicyFailed) -> None:
        self._failures.labels(failure.kind).inc()
        if (held_back := self._lines.turn()) is not None:
            self._log.error(
                "policy_failed",
                policy=failure.policy,
                kind=failure.kind,
                reason=failure.reason,
                instead=KvPolicy.name,
                held_back=held_back,
                exc_info=failure.__cause__,
            )
