"""How fast the engine is, from its own steps. Pure."""

_WEIGHT = 0.1  # of the newest step in the moving averages


class Rates:
    """Moving averages. A mixed step's time is what a pure decode step takes, and the rest is prefill."""

    def __init__(self, prefill_tokens_per_s: float, decode_step_s: float) -> None:
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.decode_step_s = decode_step_s

    def observe(self, prefill_tokens: int, decode_tokens: int, step_s: float) -> None:
        if prefill_tokens:
            prefill_s = step_s - (self.decode_step_s if decode_tokens else 0.0)
            if prefill_s > 0:
                self.prefill_tokens_per_s += _WEIGHT * (prefill_tokens / prefill_s - self.prefill_tokens_per_s)
        elif decode_tokens:
            self.decode_step_s += _WEIGHT * (step_s - self.decode_step_s)
