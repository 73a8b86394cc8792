"""How long a request waits for blocks of lower tiers: never longer than computing them would take."""

from collections.abc import Iterable

from kvbus_worker.core.onboard_rates import OnboardRates


class Patience:
    """``deadline``: the end of all waiting, on the caller's clock. ``prefill_tokens_per_s`` 0: nobody computes the blocks instead
    (a prefetch), so only the deadline counts."""

    def __init__(self, deadline: float, prefill_tokens_per_s: float = 0.0) -> None:
        self._deadline = deadline
        self._prefill = prefill_tokens_per_s
        self._give_up_at: float | None = None
        self._since = 0.0
        self._brought = 0

    def wait_s(self, missing_tokens: int, now: float) -> float:
        """For the next of ``missing_tokens``. What came so far has shown the pace: below that of computing there is no wait."""
        if missing_tokens <= 0:
            return 0.0
        left_s = self._deadline - now
        if self._prefill > 0:
            recompute_s = missing_tokens / self._prefill
            if self._give_up_at is None:
                self._give_up_at, self._since = now + recompute_s, now
            if self._brought and self._brought < (now - self._since) * self._prefill:
                return 0.0
            left_s = min(left_s, self._give_up_at - now, recompute_s)
        return max(left_s, 0.0)

    def came(self, tokens: int) -> None:
        self._brought += tokens


class LowerTiers:
    """Which lower tiers are worth asking: those faster than computing when last seen, or not seen for ``probe_s``."""

    def __init__(self, rates: OnboardRates, *, probe_s: float) -> None:
        self._rates = rates
        self._probe_s = probe_s
        self._late: dict[str, float] = {}
        self._next_probe: dict[str, float] = {}

    def worth_asking(
        self, tiers: Iterable[str], missing_tokens: int, prefill_tokens_per_s: float, now: float
    ) -> tuple[str, ...]:
        """For so many tokens. ``prefill_tokens_per_s`` 0: nobody computes them instead, so all are."""
        if not prefill_tokens_per_s:
            return tuple(tiers)
        return tuple(tier for tier in tiers if self._is_worth_it(tier, missing_tokens, prefill_tokens_per_s, now))

    def observe(self, tier: str, tokens: int, seconds: float) -> None:
        self._rates.observe(tier, tokens, seconds)
        if tokens:
            self._late.pop(tier, None)

    def came_too_late(self, tier: str, recompute_s: float, now: float) -> None:
        """It had the blocks, and gave none of them in the time in which they are computed. That is no rate, and nothing against it
        where more is to be computed."""
        self._late[tier] = max(recompute_s, self._late.get(tier, 0.0))
        self._next_probe[tier] = now + self._probe_s

    def _is_worth_it(self, tier: str, missing_tokens: int, prefill_tokens_per_s: float, now: float) -> bool:
        rate = self._rates.tokens_per_s.get(tier, prefill_tokens_per_s)
        if rate >= prefill_tokens_per_s and missing_tokens / prefill_tokens_per_s > self._late.get(tier, 0.0):
            return True
        if now < self._next_probe.get(tier, 0.0):
            return False
        self._next_probe[tier] = now + self._probe_s
        return True
