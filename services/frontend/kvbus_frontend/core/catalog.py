"""Which models are served, by which workers: decided from the instance records alone."""

from collections.abc import Container, Iterable

import msgspec

from kvbus_wire.records import InstanceRecord, ModelCard


class Offer(msgspec.Struct, frozen=True):
    """One model as it is served.

    ``workers``: those with this very card; ``others``: workers of the same name with another card, to which nothing is sent.
    ``guidance``: all workers constrain output.
    """

    card: ModelCard
    workers: tuple[str, ...]
    others: tuple[str, ...] = ()
    guidance: bool = False

    @property
    def allowed(self) -> tuple[str, ...]:
        """For the router: empty while all workers of the name will do."""
        return self.workers if self.others else ()


class Departed:
    """Models that nobody offers any more, for a while: their workers may be about to come back. At most ``limit`` names."""

    def __init__(self, *, keep_s: float, limit: int) -> None:
        self._keep_s = keep_s
        self._limit = limit
        self._left_at: dict[str, float] = {}

    def update(self, before: Iterable[str], after: Container[str], now: float) -> None:
        for name in [name for name in self._left_at if name in after]:
            del self._left_at[name]
        for name in before:
            if name not in after:
                self._left_at[name] = now
        while len(self._left_at) > self._limit:
            del self._left_at[next(iter(self._left_at))]

    def holds(self, name: str, now: float) -> bool:
        return name in self._left_at and now - self._left_at[name] <= self._keep_s


def loading_of(records: Iterable[InstanceRecord]) -> frozenset[str]:
    """Models that workers are loading. Draining ones do not count."""
    return frozenset(r.loading for r in records if r.loading and r.worker is None and not r.draining)


def offers_of(records: Iterable[InstanceRecord], current: dict[str, Offer]) -> dict[str, Offer]:
    """The offers by model name. Draining workers do not count.

    Among differing cards under one name, the one in use (``current``) stays as long as a worker has it; else the card of the worker
    that started first wins.
    """
    by_name: dict[str, dict[ModelCard, list[InstanceRecord]]] = {}
    for record in records:
        if record.worker is not None and not record.draining:
            cards = by_name.setdefault(record.worker.model.name, {})
            cards.setdefault(_identity(record.worker.model), []).append(record)
    return {name: _offer(cards, current.get(name)) for name, cards in sorted(by_name.items())}


def _identity(card: ModelCard) -> ModelCard:
    """The card without what may differ between workers that are interchangeable."""
    return msgspec.structs.replace(card, created_s=0)


def _offer(cards: dict[ModelCard, list[InstanceRecord]], current: Offer | None) -> Offer:
    chosen = _identity(current.card) if current is not None else None
    if chosen is None or chosen not in cards:
        chosen = min(cards, key=lambda card: min((r.started_ms, r.instance_id) for r in cards[card]))
    records = cards[chosen]
    first = min(records, key=lambda record: (record.started_ms, record.instance_id))
    assert first.worker is not None  # noqa: S101  # by construction, for the type checker
    others = sorted(record.instance_id for card, found in cards.items() if card != chosen for record in found)
    guidance = all(record.worker is not None and record.worker.guidance for record in records)
    return Offer(first.worker.model, tuple(sorted(r.instance_id for r in records)), tuple(others), guidance)
