"""How fast blocks come from elsewhere, from what was fetched."""

_KEPT = 0.9
"""Part of the former sums that still counts after one more observation."""


class OnboardRates:
    """Sums with forgetting, by source (g2, g3, g4, remote): long fetches count for more than short ones, new ones for more than old
    ones. The worker fetches whatever kvbm has, also when a router does not count on it, so that a bad moment is forgotten again.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def observe(self, source: str, tokens: int, seconds: float) -> None:
        """``seconds``: from the question to the last block in G1. Nothing fetched says nothing about the rate."""
        if tokens > 0 and seconds > 0:
            old_tokens, old_s = self._sums.get(source, (0.0, 0.0))
            self._sums[source] = (old_tokens * _KEPT + tokens, old_s * _KEPT + seconds)

    @property
    def tokens_per_s(self) -> dict[str, float]:
        return {source: tokens / seconds for source, (tokens, seconds) in self._sums.items()}
