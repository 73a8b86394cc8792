"""One choice on its way over one or more workers: what it has produced, and whether it may move on."""

from kvbus_frontend.core.dispatch import Job
from kvbus_frontend.core.prompt import Prompt
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.frontend import Delta
from kvbus_wire.packing import unpack_tokens


class GapInOutput(Exception):
    """A delta that does not follow what was received."""


class Progression:
    """The state of a choice that survives a change of worker.

    Every attempt has a request id of its own: a worker runs one id once, and the choice may come back to a worker that it left.
    """

    def __init__(self, job: Job, migration_limit: int) -> None:
        self.job = job
        self.output: list[int] = []
        self.attempt = 0
        self.excluded: tuple[str, ...] = ()
        self.begun = False
        self._limit = migration_limit
        self._prompt = job.prompt
        self._covered = 0

    @property
    def request_id(self) -> str:
        return self.job.request_id if not self.attempt else f"{self.job.request_id}~{self.attempt}"

    @property
    def is_complete(self) -> bool:
        """Whether only the news of the end was lost."""
        return len(self.output) >= self.job.stopping.max_tokens

    def prompt(self) -> Prompt:
        """The prompt with the output so far."""
        self._prompt = self._prompt.extended(self.output[self._covered :])
        self._covered = len(self.output)
        return self._prompt

    def accept(self, delta: Delta) -> tuple[list[int], int]:
        """The new tokens of a delta, and how many of its tokens were known already. Raise GapInOutput."""
        tokens = unpack_tokens(delta.tokens)
        known = len(self.output) - delta.start
        if known < 0:
            raise GapInOutput(f"a delta starts at {delta.start}, but only {len(self.output)} tokens have come")
        new = tokens[known:]
        self.output.extend(new)
        return new, min(known, len(tokens))

    def can_move_on(self, failure: ErrorReply) -> bool:
        """Whether another attempt is allowed after this failure."""
        return failure.retryable and self.attempt < self._limit

    def move_on(self, worker_id: str, failure: ErrorReply) -> None:
        """Count an attempt; the worker that failed is left out, unless the router then has none at all."""
        self.attempt += 1
        if failure.code is ErrorCode.NO_WORKERS:
            self.excluded = ()
        elif worker_id and worker_id not in self.excluded:
            self.excluded = (*self.excluded, worker_id)
