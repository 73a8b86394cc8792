"""How long a step takes.

    step_s = (step_base_s
              + prefill tokens / prefill_tokens_per_s
              + attention_s_per_pair * sum over prefill chunks of (new tokens * context before and within the chunk)
              + decode_s_per_seq * decoding sequences
              + decode_s_per_context_token * sum of their context lengths) / speedup

The first two terms are the linear layers, the third is the quadratic part of prefill attention, the last two are decode's own
compute and KV traffic. A step without any work takes no time. ``speedup`` infinite: no step takes any time.
"""

import math

import msgspec


class StepWork(msgspec.Struct):
    """What one step computes. ``attention_pairs``: (query, key) pairs of the prefill chunks."""

    prefill_tokens: int = 0
    attention_pairs: int = 0
    decode_seqs: int = 0
    decode_context: int = 0

    def add_prefill(self, new: int, context_before: int) -> None:
        self.prefill_tokens += new
        self.attention_pairs += new * context_before + new * (new + 1) // 2

    def add_decode(self, context: int) -> None:
        self.decode_seqs += 1
        self.decode_context += context


class TimingModel(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults resemble an 8B model on one data-centre GPU."""

    step_base_s: float = 0.006
    prefill_tokens_per_s: float = 20_000.0
    attention_s_per_pair: float = 4e-10
    decode_s_per_seq: float = 2e-5
    decode_s_per_context_token: float = 3e-8
    speedup: float = 1.0

    def __post_init__(self) -> None:
        costs = (self.step_base_s, self.attention_s_per_pair, self.decode_s_per_seq, self.decode_s_per_context_token)
        if not all(cost >= 0 and math.isfinite(cost) for cost in costs):
            raise ValueError("a cost of the timing model is negative or not finite")
        if not self.prefill_tokens_per_s > 0 or not self.speedup > 0:
            raise ValueError("prefill_tokens_per_s and speedup must be above 0")

    def step_s(self, work: StepWork) -> float:
        if not (work.prefill_tokens or work.decode_seqs):
            return 0.0
        seconds = (
            self.step_base_s
            + work.prefill_tokens / self.prefill_tokens_per_s
            + self.attention_s_per_pair * work.attention_pairs
            + self.decode_s_per_seq * work.decode_seqs
            + self.decode_s_per_context_token * work.decode_context
        )
        return seconds / self.speedup

    def decode_steps_s(self, work: StepWork, steps: int) -> float:
        """Duration of ``steps`` decode steps in a row, the first of which is ``work``: each context grows by a token a step."""
        grown = work.decode_seqs * (steps * (steps - 1) // 2)
        return steps * self.step_s(work) + self.decode_s_per_context_token * grown / self.speedup

    @property
    def free(self) -> bool:
        """No step takes any time."""
        return math.isinf(self.speedup)

    def prior_prefill_tokens_per_s(self, max_batched_tokens: int) -> float:
        """Expected prefill rate at full batches without context."""
        work = StepWork(prefill_tokens=max_batched_tokens)
        seconds = self.step_s(work)
        return max_batched_tokens / seconds if seconds > 0 else 1e9

    def prior_decode_step_s(self) -> float:
        """Expected time of a decode step of one short sequence."""
        return self.step_s(StepWork(decode_seqs=1))
