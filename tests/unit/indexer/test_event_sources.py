from kvbus_indexer.core.sources import EventSource, Silence
from kvbus_testkit.index_events import load_report


def silence(source: EventSource, now: float, *, heard: bool = False) -> Silence | None:
    return source.silence(heard=heard, grace_s=10.0, now=now)


def test_a_worker_that_does_nothing_has_nothing_to_say() -> None:
    source = EventSource(declared=False)
    assert silence(source, 1000.0) is None
    source.report(load_report(0), 0.0)
    assert silence(source, 1000.0) is None


def test_one_that_holds_blocks_and_emits_nothing_is_silent_after_the_grace_time() -> None:
    source = EventSource(declared=False)
    source.report(load_report(0, used_blocks=3), 5.0)
    source.report(load_report(0, used_blocks=0), 6.0)
    assert silence(source, 14.9) is None
    assert silence(source, 15.0) is Silence.SILENT
    assert silence(source, 15.0, heard=True) is None


def test_one_whose_events_do_not_arrive_is_unheard_and_one_that_was_quiet_all_along_is_not() -> None:
    source = EventSource(declared=False)
    source.report(load_report(7, used_blocks=3), 0.0)
    assert silence(source, 1000.0) is None
    source.report(load_report(8, used_blocks=3), 1000.0)
    assert silence(source, 1009.9) is None
    assert silence(source, 1010.0) is Silence.UNHEARD
    assert silence(source, 1010.0, heard=True) is None


def test_one_that_declares_to_have_no_events_is_believed_at_once_unless_it_is_heard() -> None:
    source = EventSource(declared=True)
    assert silence(source, 0.0) is Silence.DECLARED
    assert silence(source, 0.0, heard=True) is None
