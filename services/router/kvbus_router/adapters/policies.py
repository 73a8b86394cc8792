"""Finds a policy by its name: a built-in one, or one that another distribution brings."""

from importlib.metadata import entry_points
from typing import cast

from kvbus_router.core.policies import BUILT_IN, KvPolicy, RoutingPolicy
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
        return cast("RoutingPolicy", found[name].load()())
    except Exception as problem:
        raise BadSettings(f"policy {name!r} ({found[name].value}) cannot be made: {problem!r}") from problem
