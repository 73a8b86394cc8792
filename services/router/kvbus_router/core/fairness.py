"""Whose turn it is among tenants: deficit round robin in uncached tokens.

Each tenant of a policy class is a flow. In a round, a flow gets ``quantum_tokens * weight`` to spend, and keeps its turn while its
balance is above zero. What a turn costs is known when it is taken (how much of a prompt is cached depends on the worker), so it is
charged afterwards and may leave a debt, which later rounds pay off. Rounds in which nobody's balance gets above zero are skipped.

Of flows that always have somebody waiting, any two get, per unit of weight, tokens that differ by at most
``2 * quantum_tokens + the largest turn / the smaller weight``, however long it goes on.
"""

from collections.abc import Iterable
from typing import NamedTuple

LEAST_TURN_TOKENS = 64
"""A turn that computes nothing takes a slot all the same."""

OTHERS = "*"
"""The tenant of all those for whom there is no flow of their own any more."""


class FlowKey(NamedTuple):
    policy_class: str = ""
    tenant: str = ""


ONE_FLOW = FlowKey()
"""Of everybody, where nobody is told apart."""


class _Flow:
    __slots__ = ("balance", "position", "share", "waiting")

    def __init__(self, share: float, position: int) -> None:
        self.share = share
        self.position = position
        self.balance = 0.0
        self.waiting = 0

    def rounds(self) -> int:
        """How many rounds it takes until it may spend."""
        return 0 if self.balance > 0 else int(-self.balance // self.share) + 1


class RoundRobin:
    """At most ``max_flows`` flows, and one for all others in each class. A flow in debt is remembered while others wait."""

    def __init__(self, quantum_tokens: int, max_flows: int) -> None:
        self._quantum_tokens = quantum_tokens
        self._max_flows = max_flows
        self._flows: dict[FlowKey, _Flow] = {}
        self._position = 0

    def __len__(self) -> int:
        return len(self._flows)

    def join(self, key: FlowKey, weight: float) -> FlowKey:
        """One more waits; in which flow: that of others when there are too many. The newest weight counts."""
        if key not in self._flows and not self._has_room():
            self._forget_an_idle_one()
            if not self._has_room():
                key = FlowKey(key.policy_class, OTHERS)
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = _Flow(self._quantum_tokens * weight, self._next_position())
        flow.share = self._quantum_tokens * weight
        flow.balance = min(flow.balance, flow.share)
        flow.waiting += 1
        return key

    def leave(self, key: FlowKey) -> None:
        """One less waits."""
        flow = self._flows[key]
        flow.waiting -= 1
        if not flow.waiting and flow.balance >= 0:
            del self._flows[key]

    def order(self, keys: Iterable[FlowKey]) -> list[FlowKey]:
        """Whose turn it is, whose it is if that one cannot use it, and so on."""
        flows = self._flows
        return sorted(keys, key=lambda key: (flows[key].rounds(), flows[key].position))

    def charge(self, key: FlowKey, tokens: int) -> None:
        """The flow had a turn. Call before its `leave`."""
        flow = self._flows[key]
        rounds = flow.rounds()
        for other in self._flows.values() if rounds else ():
            # Who could not use the turn that it had gets no more for that.
            if other.balance <= 0:
                other.balance = min(other.balance + rounds * other.share, other.share)
        flow.balance -= max(tokens, LEAST_TURN_TOKENS)
        if flow.balance <= 0:
            flow.position = self._next_position()
        for paid in [k for k, f in self._flows.items() if not f.waiting and f.balance >= 0]:
            del self._flows[paid]

    def _next_position(self) -> int:
        self._position += 1
        return self._position

    def _has_room(self) -> bool:
        most = self._max_flows
        return len(self._flows) < most or sum(key.tenant != OTHERS for key in self._flows) < most

    def _forget_an_idle_one(self) -> None:
        idle = [key for key, flow in self._flows.items() if not flow.waiting]
        if idle:
            del self._flows[max(idle, key=lambda key: self._flows[key].balance)]

    def check_integrity(self, waiting: dict[FlowKey, int]) -> None:
        """``waiting``: how many wait per flow. Raise AssertionError when an invariant is broken."""
        if waiting != {key: flow.waiting for key, flow in self._flows.items() if flow.waiting}:
            raise AssertionError("the flows are miscounted")
        if any(flow.balance > flow.share for flow in self._flows.values()):
            raise AssertionError("a flow has saved more than a round brings")
        if any(not flow.waiting and flow.balance >= 0 for flow in self._flows.values()):
            raise AssertionError("a flow is kept that neither waits nor owes anything")
        if sum(key.tenant != OTHERS for key in self._flows) > self._max_flows:
            raise AssertionError("there are too many flows")
