"""How many placed requests each policy class and each tenant in it has."""

from collections import Counter

from kvbus_router.core.fairness import FlowKey


class Shares:
    """What nobody uses is not kept."""

    def __init__(self) -> None:
        self._flows: Counter[FlowKey] = Counter()
        self._classes: Counter[str] = Counter()

    def add(self, flow: FlowKey) -> None:
        self._flows[flow] += 1
        self._classes[flow.policy_class] += 1

    def drop(self, flow: FlowKey) -> None:
        self._flows[flow] -= 1
        if not self._flows[flow]:
            del self._flows[flow]
        self._classes[flow.policy_class] -= 1
        if not self._classes[flow.policy_class]:
            del self._classes[flow.policy_class]

    def of_flow(self, flow: FlowKey) -> int:
        return self._flows[flow]

    def of_class(self, name: str) -> int:
        return self._classes[name]

    def check_integrity(self, flows: Counter[FlowKey]) -> None:
        """``flows``: counted anew. Raise AssertionError when an invariant is broken."""
        classes: Counter[str] = Counter()
        for flow, count in flows.items():
            classes[flow.policy_class] += count
        if dict(self._flows) != dict(flows) or dict(self._classes) != dict(classes):
            raise AssertionError("the shares are miscounted")
