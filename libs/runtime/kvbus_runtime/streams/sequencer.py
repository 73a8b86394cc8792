"""Puts the step frames of one worker incarnation back in order. Pure.

    expected          next frame to deliver; everything below was delivered (or given up)
    held              frames above it that came early, at most ``max_frames`` / ``max_bytes``
    seen              highest number known to exist (heartbeats tell it, too)
    gap               expected .. first held - 1, or .. seen: what must be asked for again

Until the first delivery the sequencer does not know where the numbering stands (an earlier frontend of the same id may have
consumed frames): then a gap that cannot be repaired is no loss, only the place to begin at.
"""

import msgspec

from kvbus_wire.frontend import StepFrame


class SequencerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Frames held while a gap is open; beyond it they are dropped, to be asked for again."""

    max_frames: int = 1024
    max_items: int = 65_536


class StepSequencer:
    def __init__(self, limits: SequencerLimits = SequencerLimits()) -> None:  # noqa: B008  (frozen)
        self._limits = limits
        self._held: dict[int, StepFrame] = {}
        self._held_items = 0
        self.expected = 1
        self.seen = 0
        self.has_delivered = False

    @property
    def gap(self) -> tuple[int, int] | None:
        """First and last frame missing before anything else can be delivered; None when all known frames were delivered."""
        if self.expected > self.seen:
            return None
        return self.expected, (min(self._held) - 1 if self._held else self.seen)

    def receive(self, frame: StepFrame) -> list[StepFrame]:
        """Take a frame from the wire or from a replay; returns those that are now deliverable, in order, each once."""
        self.seen = max(self.seen, frame.seq)
        if frame.is_heartbeat or frame.seq < self.expected or frame.seq in self._held:
            return []
        if frame.seq > self.expected:
            self._hold(frame)
            return []
        self.expected += 1
        ready = [frame, *self._take_held()]
        self.has_delivered = True
        return ready

    def _hold(self, frame: StepFrame) -> None:
        items = _items(frame)
        if len(self._held) < self._limits.max_frames and self._held_items + items <= self._limits.max_items:
            self._held[frame.seq] = frame
            self._held_items += items

    def _take_held(self) -> list[StepFrame]:
        ready = []
        while self.expected in self._held:
            frame = self._held.pop(self.expected)
            self._held_items -= _items(frame)
            ready.append(frame)
            self.expected += 1
        return ready

    def give_up(self) -> tuple[list[StepFrame], bool]:
        """The gap cannot be repaired. Returns frames to deliver and whether anything may be lost: if so, nothing is delivered,
        and what comes next is for streams opened from now on."""
        gap = self.gap
        if gap is None:
            return [], False
        if not self.has_delivered:
            self.expected = gap[1] + 1
            ready = self._take_held()
            self.has_delivered = bool(ready)
            return ready, False
        self._held.clear()
        self._held_items = 0
        self.expected = self.seen + 1
        return [], True

    def skip(self) -> None:
        """Nobody waits for anything: go on behind all that is known."""
        self._held.clear()
        self._held_items = 0
        self.expected = self.seen + 1
        self.has_delivered = True

    def rewind(self, seq: int) -> None:
        """Whatever was received, the worker stands at ``seq``: go on behind it."""
        self.seen = seq
        self.skip()

    def check_integrity(self) -> None:
        assert all(seq > self.expected for seq in self._held)  # noqa: S101
        assert self._held_items == sum(_items(frame) for frame in self._held.values())  # noqa: S101
        assert len(self._held) <= self._limits.max_frames  # noqa: S101
        assert self.expected <= self.seen + 1  # noqa: S101


def _items(frame: StepFrame) -> int:
    return len(frame.started) + sum(1 + len(delta.tokens) // 4 for delta in frame.deltas) + len(frame.ended)
