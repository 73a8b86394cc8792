"""Which sessions are open, what they hold, and where they have run."""

from kvbus_replay.simulation.workers import SimulatedWorker


class OpenSessions:
    """``peak_tokens``: what open sessions held together, at most."""

    def __init__(self) -> None:
        self.peak_tokens = 0
        self._tokens: dict[str, int] = {}
        self._chains: dict[str, list[bytes]] = {}
        self._workers: dict[str, dict[str, SimulatedWorker]] = {}
        self._total = 0

    def grown(self, session_id: str, tokens: int) -> bool:
        """It holds so many tokens now. False: it has just begun."""
        before = self._tokens.get(session_id)
        self._tokens[session_id] = tokens
        self._total += tokens - (before or 0)
        self.peak_tokens = max(self.peak_tokens, self._total)
        return before is not None

    def served(self, session_id: str, worker: SimulatedWorker) -> None:
        self._workers.setdefault(session_id, {})[worker.worker_id] = worker

    def workers(self, session_id: str) -> list[SimulatedWorker]:
        return list(self._workers.get(session_id, {}).values())

    def replaced(self, session_id: str, keys: list[bytes], head: int) -> list[bytes]:
        """It goes on with this chain. The blocks behind its head that it had before, when it has nothing in common with them."""
        before = self._chains.get(session_id, [])
        self._chains[session_id] = keys
        condensed = len(before) > head and (len(keys) <= head or keys[head] != before[head])
        return before[head:] if condensed else []

    def ended(self, session_id: str) -> None:
        self._total -= self._tokens.pop(session_id, 0)
        self._workers.pop(session_id, None)
        self._chains.pop(session_id, None)
