"""Finds a policy by its name: a built-in one, or one that another distribution brings; and tells when that fails."""

from collections.abc import Callable
from importlib.metadata import entry_points
from math import inf
from typing import Any

from kvbus_router.core.policies import BUILT_IN, KvPolicy, PolicyFailed, RoutingPolicy
from kvbus_runtime.metrics import Metrics
from kvbus_runtime.settings import BadSettings

ENTRY_POINTS = "kvbus.routing_policies"
LOG_INTERVAL_S = 60.0
"""A policy that fails, fails often: at each request."""


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
    """Counts all, and logs one at a time."""

    def __init__(self, clock: Callable[[], float], metrics: Metrics, log: Any) -> None:
        self._clock = clock
        self._log = log
        self._failures = metrics.counter("policy_failures", "choices that the routing policy could not make", ("kind",))
        self._logged_at = -inf
        self._since = 0

    def __call__(self, failure: PolicyFailed) -> None:
        self._failures.labels(failure.kind).inc()
        self._since += 1
        now = self._clock()
        if now < self._logged_at + LOG_INTERVAL_S:
            return
        self._log.error(
            "policy_failed",
            policy=failure.policy,
            kind=failure.kind,
            reason=failure.reason,
            failures=self._since,
            instead=KvPolicy.name,
            exc_info=failure.__cause__,
        )
        self._logged_at, self._since = now, 0
