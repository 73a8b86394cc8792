"""One request inside the mock engine."""

import math
from collections.abc import Sequence as Seq

from kvbus_wire.errors import ErrorReply
from kvbus_wire.frontend import Delta, Ended, Started, TokenLogprob, Usage
from kvbus_wire.packing import pack_tokens
from kvbus_worker.engines.base import EngineRequest
from kvbus_worker.engines.mock.speech import Speech
from kvbus_worker.engines.mock.text import Text
from kvbus_worker.engines.ranking import rank
from kvbus_worker.engines.said import Said


class Sequence:
    """State and token bookkeeping of one request; the scheduler decides, this applies.

    ``computed`` tokens of ``text`` have KV entries. The newest output token has none until it is fed to the next step:

        prompt ............ output ........ newest
        [0 ......................computed)[.)          decoding: computed == len(text) - 1
        [0 ...... computed)[............... )          prefilling, also again after a preemption

    The first ``published`` full blocks are cached and referenced, ``private`` more are held without a key. It emits nothing before
    ``due_at``.
    """

    def __init__(
        self, request: EngineRequest, speech: Speech, text: Text, arrival: int, block_size: int, now: float
    ) -> None:
        self.request = request
        self.said = Said(request.directives)
        self.speech = speech
        self.rank = rank(request.priority, request.strict_priority, arrival, now)
        self.text = text
        self.cancelled = False
        self.expected_hit = 0  # tokens, while it waits
        self.waits_for: bytes | None = None  # the block that another sequence was last seen to compute
        self.running = False
        self.computed = 0
        self.published = 0
        self.private = 0
        self.emitted = min(request.resumed, len(speech.tokens))
        self.cached_tokens = 0
        self.announced = False
        self.submitted_at = now
        self.due_at = now
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self._block_size = block_size

    @property
    def decoding(self) -> bool:
        return self.computed == len(self.text) - 1 and self.first_token_at is not None

    @property
    def remaining(self) -> int:
        """Tokens to feed until the next output: 1 when decoding."""
        return len(self.text) - self.computed

    def feedable(self, now: float) -> int:
        """``remaining``, without the last token, which brings output, as long as that is not due."""
        return self.remaining if self.due_at <= now else self.remaining - 1

    @property
    def remaining_prefill(self) -> int:
        return 0 if self.decoding else self.remaining

    @property
    def held_blocks(self) -> int:
        return self.published + self.private

    def keys(self, tokens: int) -> Seq[bytes]:
        """Keys of the whole blocks in the first ``tokens`` tokens."""
        return self.text.keys(tokens // self._block_size)

    @property
    def reusable_keys(self) -> Seq[bytes]:
        """Of the blocks that may come from the cache: at least one token is left to compute, which brings output."""
        return self.keys(len(self.text) - 1)

    def next_group(self) -> int:
        """How many output tokens the next emission has; 0: it is the stop token, or the end."""
        return self.speech.ends[self.emitted] - self.emitted if self.emitted < len(self.speech.tokens) else 0

    def computed_after(self, new: int, repeats: int = 1) -> int:
        """``computed`` after a step that feeds ``new`` tokens; a step that reaches the newest token emits the next group.

        ``repeats`` decode steps feed one token each.
        """
        reached = self.computed + new + repeats - 1
        return reached if reached < len(self.text) else reached + max(self.next_group() - 1, 0)

    def blocks_short(self, computed: int) -> int:
        """Blocks to allocate before ``computed`` tokens can be held."""
        return max(math.ceil(computed / self._block_size) - self.held_blocks, 0)

    def admit(self, matched: int, now: float) -> None:
        """The scheduler has referenced the first ``matched`` blocks."""
        self.published = matched
        self.computed = matched * self._block_size
        if self.admitted_at is None:
            self.admitted_at = now
            self.due_at = now + self.speech.prefill_s
            self.cached_tokens = self.computed

    def lose_blocks(self) -> None:
        self.computed = self.published = self.private = 0

    def announce(self) -> Started | None:
        if self.announced:
            return None
        self.announced = True
        onboarded = min(self.request.onboarded_tokens, self.cached_tokens)
        return Started(self.request.request_id, self.cached_tokens, onboarded)

    def emit(self, now: float, repeats: int = 1) -> Delta | None:
        """The output of ``repeats`` steps that reached the newest token; None for the stop token's step."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.due_at = now + self.speech.step_s
        group = repeats if repeats > 1 else self.next_group()
        if not group:
            return None
        new = self.speech.tokens[self.emitted : self.emitted + group]
        start = self.emitted
        self.text.append(new)
        self.emitted += group
        return Delta(self.request.request_id, start, pack_tokens(new), self._logprobs(new))

    @property
    def finished(self) -> bool:
        """Nothing more is to come, except perhaps the stop token."""
        return self.emitted >= len(self.speech.tokens)

    def said_all(self) -> Ended:
        """The end of a speech that was not interrupted."""
        speech = self.speech
        return self.ended(speech.reason, stop_token_id=speech.stop_token_id, error=speech.error)

    def ended(self, reason: str, *, stop_token_id: int | None = None, error: ErrorReply | None = None) -> Ended:
        prompt = len(self.request.tokens) - self.request.resumed
        started, first = self.admitted_at, self.first_token_at
        usage = Usage(
            prompt_tokens=prompt,
            output_tokens=self.emitted,
            cached_tokens=min(self.cached_tokens, prompt),
            onboarded_tokens=min(self.request.onboarded_tokens, self.cached_tokens, prompt),
            queue_s=started - self.submitted_at if started is not None else 0.0,
            prefill_s=first - started if started is not None and first is not None else 0.0,
        )
        return Ended(
            request_id=self.request.request_id, reason=reason, usage=usage, stop_token_id=stop_token_id, error=error
        )

    def _logprobs(self, tokens: Seq[int]) -> tuple[TokenLogprob, ...]:
        """Made up: the chosen token has half of the mass, each alternative (a neighbouring id) half of the rest."""
        count = self.request.sampling.logprobs
        if count is None:
            return ()
        half = math.log(0.5)
        entries = []
        for token in tokens:
            # Downwards where there is room below, so that every id is in the vocabulary.
            step = -1 if token >= count else 1
            ranked = tuple((token + step * rank, half * (rank + 1)) for rank in range(count))
            entries.append(TokenLogprob(token, half, ranked))
        return tuple(entries)
