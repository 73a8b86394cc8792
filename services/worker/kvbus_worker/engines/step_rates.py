"""How fast an engine is, from its own steps."""

import math
import time
from collections.abc import Callable

_WINDOW_TOKENS = 8192
_DECODE_WEIGHT = 0.1  # of the newest step in the moving average
_HALF_LIFE_S = 60.0


class StepRates:
    """Prefill over the last 8,192 tokens or so, and a moving average of pure decode steps.

    Every step has a part that does not depend on its tokens: reading the weights, launching kernels. A pure decode step is little
    else, so its time is taken off a step with prefill, and a step of which that is the greater part says nothing about prefill:
    the few new tokens of an agent's turn would pass for a slow engine otherwise.

    Nobody asks an engine for prompts that looks slow, so while it has none its rate goes back to the best that was ever measured:
    half of the way each minute. Else one that once was held up by others would look slow for ever.
    """

    def __init__(
        self, prefill_tokens_per_s: float, decode_step_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.decode_step_s = decode_step_s
        self._best = self._measured = prefill_tokens_per_s
        self._measured_at = clock()
        self._clock = clock

    @property
    def prefill_tokens_per_s(self) -> float:
        kept = math.pow(0.5, (self._clock() - self._measured_at) / _HALF_LIFE_S)
        return self._best - (self._best - self._measured) * kept

    def observe(self, prefill_tokens: int, decode_seqs: int, step_s: float, steps: int = 1) -> None:
        """``steps`` equal steps of pure decode may come as one, with their whole time."""
        if step_s <= 0:
            return
        if prefill_tokens:
            prefill_s = step_s - self.decode_step_s
            if prefill_s > self.decode_step_s:
                window_s = _WINDOW_TOKENS / self.prefill_tokens_per_s
                self._measured = (_WINDOW_TOKENS + prefill_tokens) / (window_s + prefill_s)
                self._measured_at = self._clock()
                self._best = max(self._best, self._measured)
        elif decode_seqs:
            weight = 1 - (1 - _DECODE_WEIGHT) ** steps
            self.decode_step_s += weight * (step_s / steps - self.decode_step_s)
