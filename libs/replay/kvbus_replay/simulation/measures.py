"""What is measured while a trace runs."""

from array import array
from collections.abc import Sequence

import msgspec


class Distribution(msgspec.Struct, frozen=True):
    """Of values without weights. All zero when there are none."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def distribution(values: Sequence[float]) -> Distribution:
    ordered = sorted(values)
    if not ordered:
        return Distribution(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    return Distribution(
        len(ordered),
        sum(ordered) / len(ordered),
        quantile(ordered, 0.5),
        quantile(ordered, 0.9),
        quantile(ordered, 0.99),
        ordered[-1],
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The least value that at least ``share`` of them do not exceed. ``ordered`` ascends and is not empty."""
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


class Weighted:
    """Values that come often: equal ones are counted, to three digits."""

    def __init__(self) -> None:
        self._counts: dict[float, int] = {}

    def add(self, value: float, weight: int) -> None:
        rounded = float(f"{value:.3g}")
        self._counts[rounded] = self._counts.get(rounded, 0) + weight

    def distribution(self) -> Distribution:
        ordered = sorted(self._counts.items())
        total = sum(self._counts.values())
        if not total:
            return distribution(())

        def at(share: float) -> float:
            seen = 0
            for value, weight in ordered:
                seen += weight
                if seen >= share * total:
                    return value
            return ordered[-1][0]

        mean = sum(value * weight for value, weight in ordered) / total
        return Distribution(total, mean, at(0.5), at(0.9), at(0.99), ordered[-1][0])


class CallRecords:
    """One value per finished call in each column; times in seconds."""

    def __init__(self) -> None:
        self.arrived_s = array("d")
        self.ttft_s = array("d")
        self.total_s = array("d")
        self.router_queue_s = array("d")
        self.engine_queue_s = array("d")
        self.inter_token_s = Weighted()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.onboarded_tokens = 0
        self.oracle_tokens = 0
        # Of calls that go on with a session.
        self.resumed_ttft_s = array("d")
        self.resumed_tokens = 0
        self.recomputed_tokens = 0
        self.working_set_tokens = 0
        self.output_tokens = 0
        self.failed: dict[str, int] = {}
        self.retries = 0

    def fail(self, reason: str) -> None:
        self.failed[reason] = self.failed.get(reason, 0) + 1
