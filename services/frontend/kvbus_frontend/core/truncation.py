"""Which turns go when a conversation is longer than the context and the client has asked for truncation.

What stays: the system turns at the top, the newest user turn, and as much of the end as fits. A result never loses its call: turns
go in units, each a user or system turn, or what the assistant said with the results that it got.
"""

from collections.abc import Sequence

import msgspec

from kvbus_protocols.conversation import Conversation, Turn

RESERVED_SHARE = 4
"""One part in so many of the context stays free for an answer of unknown length, and two at most for one of known length."""


def prompt_room(context_length: int, token_limit: int | None) -> int:
    """How many tokens a shortened prompt may have."""
    share = context_length // RESERVED_SHARE
    return context_length - (share if token_limit is None else min(token_limit, 2 * share))


class Droppable:
    """A conversation with its units, oldest first, as far as they may go."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        turns = conversation.turns
        head = next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))
        self._head = turns[:head]
        self._units = _units(turns[head:])
        users = [i for i, unit in enumerate(self._units) if unit[0].role == "user"]
        kept = {len(self._units) - 1, *users[-1:]}
        self._order = [i for i in range(len(self._units)) if i not in kept]

    @property
    def most(self) -> int:
        """How many units may go."""
        return len(self._order)

    def without(self, count: int) -> Conversation:
        """The conversation without its ``count`` oldest units. Breakpoints behind the cut would point elsewhere, so they go."""
        if not count:
            return self._conversation
        gone = set(self._order[:count])
        rest = [turn for i, unit in enumerate(self._units) if i not in gone for turn in unit]
        return msgspec.structs.replace(self._conversation, turns=(*self._head, *rest), breakpoints=())


def _units(turns: Sequence[Turn]) -> list[list[Turn]]:
    units: list[list[Turn]] = []
    for turn in turns:
        if turn.role == "tool" and units:
            units[-1].append(turn)
        else:
            units.append([turn])
    return units
