"""How fast the engine is, from its own steps. Pure."""

_WEIGHT = 0.1  # of the newest step in the moving averages
_LEAST_SHARE = 0.2  # of a mixed step's time that is prefill at least, however short the step was


class Rates:
    """Moving averages. A mixed step's time is what a pure decode step takes, and the rest is prefill."""

    def __init__(self, prefill_tokens_per_s: float, decode_step_s: float) -> None:
        self._prefill_token_s = 1 / prefill_tokens_per_s
        self.decode_step_s = decode_step_s

    @property
    def prefill_tokens_per_s(self) -> float:
        return 1 / self._prefill_token_s

    def observe(self, prefill_tokens: int, decode_tokens: int, step_s: float) -> None:
        if prefill_tokens:
            prefill_s = max(step_s - (self.decode_step_s if decode_tokens else 0.0), step_s * _LEAST_SHARE)
            self._prefill_token_s += _WEIGHT * (prefill_s / prefill_tokens - self._prefill_token_s)
        elif decode_tokens:
            self.decode_step_s += _WEIGHT * (step_s - self.decode_step_s)
