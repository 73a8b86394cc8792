"""Step frames over a wire that drops, doubles and reorders: exact content once and in order, or the loss is told."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbus_runtime.streams.sequencer import SequencerLimits, StepSequencer
from kvbus_wire.frontend import Delta, StepFrame


def frame(seq: int) -> StepFrame:
    return StepFrame(worker_id="w", incarnation=1, seq=seq, deltas=(Delta("r", seq, b"\x00\x00\x00\x00"),))


def heartbeat(seq: int) -> StepFrame:
    return StepFrame(worker_id="w", incarnation=1, seq=seq)


class SequencerMachine(RuleBasedStateMachine):
    """A sender with a bounded ring, a wire that does anything, and the sequencer at the end of it."""

    RING = 8

    def __init__(self) -> None:
        super().__init__()
        self.sequencer = StepSequencer(SequencerLimits(max_frames=4, max_items=6))
        self.sent = 0
        self.ring: deque[int] = deque(maxlen=self.RING)
        self.wire: list[StepFrame] = []
        self.delivered: list[int] = []
        self.excused_up_to = 0

    def take(self, received: StepFrame) -> None:
        self.note(self.sequencer.receive(received))

    def note(self, ready: list[StepFrame]) -> None:
        self.delivered.extend(one.seq for one in ready)

    @rule()
    def send(self) -> None:
        self.sent += 1
        self.ring.append(self.sent)
        self.wire.append(frame(self.sent))

    @rule()
    def send_heartbeat(self) -> None:
        self.wire.append(heartbeat(self.sent))

    @precondition(lambda self: self.wire)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        self.take(self.wire.pop(data.draw(st.integers(0, len(self.wire) - 1))))

    @precondition(lambda self: self.wire)
    @rule()
    def arrive_first(self) -> None:
        self.take(self.wire.pop(0))

    @precondition(lambda self: self.wire)
    @rule(data=st.data())
    def arrive_and_stay(self, data: st.DataObject) -> None:
        self.take(self.wire[data.draw(st.integers(0, len(self.wire) - 1))])

    @precondition(lambda self: self.wire)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.wire.pop(data.draw(st.integers(0, len(self.wire) - 1)))

    @precondition(lambda self: self.sequencer.gap is not None)
    @rule(most=st.integers(1, 4))
    def replay(self, most: int) -> None:
        gap = self.sequencer.gap
        assert gap is not None
        first, last = gap
        assert first <= last
        if self.ring[0] > first:
            missing_from = first
            fresh = not self.sequencer.has_delivered
            ready, lost = self.sequencer.give_up()
            # Unless nothing was ever delivered, giving up is a loss that streams are told of.
            assert lost is not fresh
            self.excused_up_to = max(self.excused_up_to, self.sequencer.expected - 1 if lost else last)
            assert missing_from <= self.excused_up_to
            self.note(ready)
            return
        for seq in list(self.ring):
            if first <= seq <= min(last, first + most - 1):
                self.take(frame(seq))

    @invariant()
    def frames_are_delivered_once_in_order_without_unexplained_holes(self) -> None:
        self.sequencer.check_integrity()
        previous = 0
        for seq in self.delivered:
            assert seq > previous
            assert seq == previous + 1 or seq - 1 <= self.excused_up_to
            previous = seq
        assert self.sequencer.expected == previous + 1 or self.sequencer.expected - 1 <= self.excused_up_to

    def teardown(self) -> None:
        """When the wire calms down and the ring still has everything, everything arrives."""
        for _ in range(100):
            gap = self.sequencer.gap
            if gap is None:
                self.take(heartbeat(self.sent))
                gap = self.sequencer.gap
            if gap is None:
                break
            if self.ring[0] > gap[0]:
                self.replay_gone()
                continue
            for seq in list(self.ring):
                if gap[0] <= seq <= gap[1]:
                    self.take(frame(seq))
        assert self.sequencer.gap is None
        assert self.sequencer.expected == self.sent + 1 or self.sent == 0

    def replay_gone(self) -> None:
        ready, _ = self.sequencer.give_up()
        self.note(ready)


SequencerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSequencer = SequencerMachine.TestCase


@given(st.permutations(list(range(1, 9))))
def test_any_order_of_a_complete_set_is_delivered_in_order(order: list[int]) -> None:
    sequencer = StepSequencer()
    delivered = [ready.seq for seq in order for ready in sequencer.receive(frame(seq))]
    assert delivered == list(range(1, 9))
    assert sequencer.gap is None


def test_a_heartbeat_tells_of_a_lost_last_frame() -> None:
    sequencer = StepSequencer()
    assert [one.seq for one in sequencer.receive(frame(1))] == [1]
    assert sequencer.receive(heartbeat(2)) == []
    assert sequencer.gap == (2, 2)
    assert [one.seq for one in sequencer.receive(frame(2))] == [2]
    assert sequencer.gap is None


def test_frames_above_the_limit_are_asked_for_again() -> None:
    sequencer = StepSequencer(SequencerLimits(max_frames=2))
    for seq in (2, 3, 4, 5):
        sequencer.receive(frame(seq))
        sequencer.check_integrity()
    assert sequencer.gap == (1, 1)
    assert [one.seq for one in sequencer.receive(frame(1))] == [1, 2, 3]
    assert sequencer.gap == (4, 5)


def test_before_the_first_delivery_an_unrepairable_gap_is_only_where_the_count_stands() -> None:
    sequencer = StepSequencer()
    sequencer.receive(frame(501))
    ready, lost = sequencer.give_up()
    assert ([one.seq for one in ready], lost) == ([501], False)
    assert [one.seq for one in sequencer.receive(frame(502))] == [502]


def test_after_a_loss_new_frames_are_delivered_again() -> None:
    sequencer = StepSequencer()
    sequencer.receive(frame(1))
    sequencer.receive(frame(3))
    assert sequencer.give_up() == ([], True)
    assert sequencer.receive(frame(2)) == []
    assert [one.seq for one in sequencer.receive(frame(4))] == [4]


@pytest.mark.parametrize("delivered", [True, False])
def test_skipping_goes_on_behind_all_that_is_known(delivered: bool) -> None:
    sequencer = StepSequencer()
    if delivered:
        sequencer.receive(frame(1))
    sequencer.receive(frame(7))
    sequencer.skip()
    sequencer.check_integrity()
    assert sequencer.gap is None
    assert [one.seq for one in sequencer.receive(frame(8))] == [8]
