"""The prompt that is likely to come next, as far as it is known when an answer has ended.

The answer is put behind its conversation as a client will send it back, and what follows it (the results of its calls, or a
person's next words) is put there as a placeholder. What the template writes before that is how the next prompt begins: with the
tools, the thoughts that the template keeps, and the calls as the model wrote them. It is cut where tokens cannot depend on what
follows.
"""

from collections.abc import Iterable, Sequence

import msgspec

from kvbus_blocks.chains import common_blocks
from kvbus_blocks.keys import KEY_BYTES
from kvbus_frontend.core.dispatch import Job
from kvbus_frontend.core.prompt import Prompt
from kvbus_parsers import CallEnded, Event, Reasoning, ReasoningEnded, Text
from kvbus_protocols.conversation import (
    Conversation,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    Turn,
)
from kvbus_tokenizers import Segment
from kvbus_wire.packing import TOKEN_BYTES
from kvbus_wire.request import AgentHints, Sampling, Stopping

PLACEHOLDER = "what-comes-next-is-not-known-yet"
LOWEST_PRIORITY = -(2**31)


class SaidParts:
    """The answer as it is told, piece by piece."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._open: list[str] = []
        self._kind: type[Text] | type[Reasoning] | None = None

    def hear(self, events: Iterable[Event]) -> None:
        for event in events:
            if not isinstance(event, self._kind or ()):
                self._close()
            match event:
                case Text(text) | Reasoning(text):
                    self._kind = type(event)
                    self._open.append(text)
                case ReasoningEnded():
                    self._close()
                case CallEnded(_, call_id, name, arguments, _):
                    self._parts.append(ToolCallPart(call_id, name, arguments))
                case _:
                    pass

    def parts(self) -> tuple[Part, ...]:
        self._close()
        return tuple(self._parts)

    def _close(self) -> None:
        text = "".join(self._open)
        if text:
            self._parts.append(ReasoningPart(text) if self._kind is Reasoning else TextPart(text))
        self._open, self._kind = [], None


def next_conversation(conversation: Conversation, said: Sequence[Part]) -> Conversation | None:
    """With the answer, and placeholders for what follows it. None when nothing can be told."""
    generation = conversation.generation
    nvext = generation.nvext
    is_rendered = nvext is None or not (nvext.use_raw_prompt or nvext.token_data)
    if not (said and is_rendered and conversation.add_generation_prompt) or conversation.continue_final:
        return None
    unknown = (TextPart(PLACEHOLDER),)
    calls = [part for part in said if isinstance(part, ToolCallPart)]
    follows = [Turn("tool", (ToolResultPart(call.id, unknown),)) for call in calls] or [Turn("user", unknown)]
    return msgspec.structs.replace(conversation, turns=(*conversation.turns, Turn("assistant", tuple(said)), *follows))


def known_beginning(segments: Sequence[Segment]) -> Sequence[Segment]:
    """Segments before the one with the first placeholder: tokens do not merge across them. Empty when there is none."""
    return next((segments[:i] for i, segment in enumerate(segments) if PLACEHOLDER in segment.text), ())


def worth_computing(predicted: Prompt, known: Prompt, *, least_tokens: int, most_tokens: int) -> Prompt | None:
    """The whole blocks of what is ``predicted``, at most ``most_tokens`` beyond what is ``known`` to be on the worker; None when
    they are fewer than ``least_tokens``."""
    common, size = common_blocks(predicted.keys, known.keys), predicted.block_size
    blocks = min(predicted.blocks, common + most_tokens // size)
    if blocks <= common or (blocks - common) * size < least_tokens:
        return None
    tokens = predicted.tokens[: blocks * size * TOKEN_BYTES]
    return msgspec.structs.replace(predicted, tokens=tokens, keys=predicted.keys[: blocks * KEY_BYTES])


def speculative_job(job: Job, prompt: Prompt, *, worker_id: str, deadline_ms: int) -> Job:
    """Computes ``prompt`` on the worker that served ``job``, behind everything else, for the same cache domain and tenant."""
    return msgspec.structs.replace(
        job,
        request_id=f"{job.request_id}-next",
        prompt=prompt,
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(max_tokens=1, ignore_eos=True),
        deadline_ms=deadline_ms,
        hints=AgentHints(priority=LOWEST_PRIORITY, osl=1),
        mock=None,
        guidance=None,
        pinned=worker_id,
        explain=False,
        speculative=True,
    )


class Base(msgspec.Struct, frozen=True):
    """What a speculation was made from; a request that continues it is the one that was foreseen, or makes it void."""

    model: str
    tenant: str
    session: str
    blocks: int
    key: bytes

    @classmethod
    def of(cls, job: Job) -> "Base":
        blocks = job.prompt.blocks
        session = job.session.id if job.session is not None else ""
        return cls(job.model, job.tenant, session, blocks, job.prompt.prefix_key(blocks))

    def is_continued_by(self, job: Job) -> bool:
        """Keys are chained, so that one key tells of all blocks before it."""
        if job.model != self.model:
            return False
        if self.session and job.session is not None and (job.session.id, job.tenant) == (self.session, self.tenant):
            return True
        prompt = job.prompt
        return 0 < self.blocks <= prompt.blocks and prompt.prefix_key(self.blocks) == self.key
