"""The sessions that this frontend has served: what they hold, and what of that nobody else does.

Bounded in number and in bytes; what was used least recently is forgotten (its blocks stay where they are: eviction is the tiers').
All steps take as long as a session has chains, however many sessions there are.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvbus_blocks.chains import common_blocks
from kvbus_blocks.keys import KEY_BYTES
from kvbus_frontend.core.claims import BlockClaims, Run
from kvbus_frontend.core.prompt import Prompt
from kvbus_wire.frontend import SessionLease, SessionScope
from kvbus_wire.request import SessionRef

MAX_CHAINS = 8
"""Of a session: agents ask about titles and the like on the side, within the same session."""
ENTRY_BYTES = 1500
"""Of a session beside its chains and prompt (measured with tracemalloc: 1100 to 1400)."""


class Freed(msgspec.Struct, frozen=True):
    """A chain that nobody needs any more, but for its first ``kept`` blocks. ``keys``: of all of it, packed."""

    model: str
    keys: bytes
    kept: int = 0

    @property
    def unneeded(self) -> bytes:
        return self.keys[self.kept * KEY_BYTES :]


class _Chain(msgspec.Struct):
    """``question``: blocks up to the end of the last thing a person said; ``closed``: it ends with an answer, not with a call."""

    model: str
    run: Run
    question: int = 0
    closed: bool = False


class Session(msgspec.Struct):
    """``chains``: the newest last. ``waits_for``: the tools that were called last, since ``used_s``. ``gone``: it was deleted; the
    blocks of what still runs of it go as that ends."""

    scope: SessionScope
    id: str
    model: str
    created_s: float
    used_s: float
    parent: str = ""
    ephemeral: bool = False
    final: bool = False
    requests: int = 0
    running: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    unpinned_tokens: int = 0
    worker_id: str = ""
    leases: tuple[SessionLease, ...] = ()
    waits_for: tuple[str, ...] = ()
    chains: list[_Chain] = []
    gone: bool = False


class Visit(msgspec.Struct):
    """A request of a session, while it runs."""

    session: Session
    chain: _Chain
    prompt: Prompt


class Served(msgspec.Struct, frozen=True):
    """What a request came to. ``prompts``: with the output of each choice; ``closed``: it was answered, by words; ``calls``: the
    tools that were called."""

    worker_id: str = ""
    prompts: Sequence[Prompt] = ()
    output_tokens: int = 0
    cached_tokens: int = 0
    unpinned_tokens: int = 0
    leases: tuple[SessionLease, ...] = ()
    closed: bool = False
    calls: tuple[str, ...] = ()


class Sessions:
    def __init__(self, *, limit: int, limit_bytes: int) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._claims = BlockClaims()
        self._by_use: OrderedDict[tuple[SessionScope, str], Session] = OrderedDict()
        self._scopes: dict[SessionScope, OrderedDict[str, Session]] = {}
        self._children: dict[tuple[SessionScope, str], dict[str, None]] = {}
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._by_use)

    @property
    def size_bytes(self) -> int:
        return len(self._by_use) * ENTRY_BYTES + self._claims.size_bytes

    # requests

    def begin(
        self,
        scope: SessionScope,
        ref: SessionRef,
        model: str,
        prompt: Prompt,
        now: float,
        *,
        question: int = 0,
        asks: bool = False,
    ) -> tuple[Visit, list[Freed]]:
        """A request begins. ``question``: blocks of the prompt up to the end of the last thing a person said; ``asks``: that is
        what it ends with. What the prompt before ended with, and this one leaves out (thoughts about a question that is answered),
        comes free."""
        session = self._enter(scope, ref, model, now)
        session.requests += 1
        session.running += 1
        session.prompt_tokens += prompt.count
        chain = _Chain(model, self._claims.claim(prompt.keys), question)
        freed = self._left_behind(session, prompt) if asks else []
        self._shrink()
        return Visit(session, chain, prompt), freed

    def extend(self, scope: SessionScope, session_id: str, model: str, prompt: Prompt) -> bool:
        """A prompt of the session is computed in advance. False: the session is not known (any more)."""
        session = self._by_use.get((scope, session_id))
        if session is None:
            return False
        last = session.chains[-1] if session.chains else None
        question, closed = (last.question, last.closed) if last is not None else (0, False)
        self._add(session, _Chain(model, self._claims.claim(prompt.keys), question, closed))
        self._shrink()
        return True

    def end(self, visit: Visit, served: Served, now: float) -> list[Freed]:
        """The request is over; what comes free when the session is, too."""
        session, chain = visit.session, visit.chain
        session.running -= 1
        session.cached_tokens += served.cached_tokens
        session.output_tokens += served.output_tokens
        added = [
            _Chain(chain.model, self._claims.claim(prompt.keys), chain.question, served.closed)
            for prompt in served.prompts
        ]
        if added:
            self._claims.release(chain.run)
        if self._by_use.get((session.scope, session.id)) is not session:
            freed = [part for each in added or [chain] for part in self._release(each)]
            return freed if session.gone else []
        session.used_s, session.waits_for = now, served.calls
        session.worker_id = served.worker_id or session.worker_id
        session.leases, session.unpinned_tokens = served.leases, served.unpinned_tokens
        for each in added or [chain]:
            self._add(session, each)
        if session.final and not session.running:
            freed = self.forget(session.scope, session.id)
            return freed if session.ephemeral else []
        self._shrink()
        return []

    def forget(self, scope: SessionScope, session_id: str) -> list[Freed]:
        """Without effect when it is not known. What runs of it goes when it ends."""
        session = self._by_use.get((scope, session_id))
        if session is None:
            return []
        session.gone = True
        return self._remove(session)

    # looking

    def find(self, scope: SessionScope, session_id: str) -> Session | None:
        return self._by_use.get((scope, session_id))

    def of(self, scope: SessionScope) -> Iterator[Session]:
        """The newest first."""
        return reversed(self._scopes.get(scope, OrderedDict()).values())

    def ephemeral_children(self, scope: SessionScope, session_id: str) -> list[str]:
        """Sub-agents of the session, with theirs: they end with it."""
        found: dict[str, None] = {}
        ahead = [session_id]
        while ahead:
            for child in self._children.get((scope, ahead.pop()), ()):
                if child not in found and child != session_id and self._by_use[scope, child].ephemeral:
                    found[child] = None
                    ahead.append(child)
        return list(found)

    def keys(self, session: Session) -> bytes:
        """Of its newest chain."""
        return self._claims.chain(session.chains[-1].run) if session.chains else b""

    def held(self, keys: bytes) -> int:
        """How many leading blocks of a chain a session of this frontend holds, or a request that runs."""
        return self._claims.held(keys)

    # inside

    def _enter(self, scope: SessionScope, ref: SessionRef, model: str, now: float) -> Session:
        key = (scope, ref.id)
        session = self._by_use.get(key)
        if session is None:
            session = Session(scope, ref.id, model, now, now)
            self._by_use[key] = session
            self._scopes.setdefault(scope, OrderedDict())[ref.id] = session
        self._by_use.move_to_end(key)
        self._scopes[scope].move_to_end(ref.id)
        session.model, session.used_s = model, now
        session.ephemeral, session.final = ref.ephemeral or session.ephemeral, ref.final or session.final
        if ref.parent and not session.parent:
            session.parent = ref.parent
            self._children.setdefault((scope, ref.parent), {})[ref.id] = None
        return session

    def _left_behind(self, session: Session, prompt: Prompt) -> list[Freed]:
        """A chain that ended with an answer to its question, when the new prompt goes on from that question without all that."""
        for chain in reversed(session.chains):
            keys = self._claims.chain(chain.run)
            common = common_blocks(keys, prompt.keys)
            if chain.closed and chain.question and chain.question <= common < len(keys) // KEY_BYTES:
                session.chains.remove(chain)
                return self._release(chain)
        return []

    def _add(self, session: Session, chain: _Chain) -> None:
        """What it continues is a chain of its own no more."""
        above = set(_ancestors(chain.run))
        kept = [old for old in session.chains if old.run not in above]
        for old in session.chains:
            if old.run in above:
                self._claims.release(old.run)
        kept.append(chain)
        for old in kept[:-MAX_CHAINS]:
            self._claims.release(old.run)
        session.chains = kept[-MAX_CHAINS:]

    def _remove(self, session: Session) -> list[Freed]:
        key = (session.scope, session.id)
        del self._by_use[key]
        sessions = self._scopes[session.scope]
        del sessions[session.id]
        if not sessions:
            del self._scopes[session.scope]
        if session.parent:
            siblings = self._children[session.scope, session.parent]
            del siblings[session.id]
            if not siblings:
                del self._children[session.scope, session.parent]
        freed = [part for chain in session.chains for part in self._release(chain)]
        session.chains = []
        return freed

    def _release(self, chain: _Chain) -> list[Freed]:
        keys = self._claims.chain(chain.run)
        freed = sum(map(len, self._claims.release(chain.run)))
        return [Freed(chain.model, keys, (len(keys) - freed) // KEY_BYTES)] if freed else []

    def _shrink(self) -> None:
        while len(self._by_use) > self._limit or (self.size_bytes > self._limit_bytes and len(self._by_use) > 1):
            session = next(iter(self._by_use.values()))
            self._remove(session)
            self.forgotten += 1

    def check_integrity(self) -> None:
        """For tests. Raise AssertionError."""
        self._claims.check_integrity()
        assert len(self._by_use) <= self._limit  # noqa: S101
        assert sum(map(len, self._scopes.values())) == len(self._by_use)  # noqa: S101


def _ancestors(run: Run) -> Iterable[Run]:
    at: Run | None = run
    while at is not None:
        yield at
        at = at.parent
