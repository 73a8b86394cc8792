"""Finds a policy by its name: a built-in one, or one that another distribution brings."""

from importlib.metadata import entry_points
from typing import cast

from kvbus_router.core.policies import BUILT_IN, RoutingPolicy
from kvbus_runtime.settings import BadSettings

ENTRY_POINTS = "kvbus.routing_policies"


def make_policy(name: str) -> RoutingPolicy:
    """Raise BadSettings when there is none of this name, or it cannot be made."""
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
