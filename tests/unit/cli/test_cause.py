"""Why a service has ended, from its log."""

from kvbus_cli.up.cause import cause_of

STARTED = '{"event": "started", "level": "info"}'


def test_the_newest_error_is_told_in_words_with_a_hint() -> None:
    refused = '{"event": "bad_settings", "error": "no model in /m", "level": "error", "service": "worker"}'
    said = cause_of([STARTED, '{"event": "bus_lost", "reason": "x", "level": "error"}', refused, STARTED], "worker")
    assert said == "bad settings: no model in /m (see `kvbus worker --help`)"


def test_of_a_crash_the_last_line_of_its_traceback_is_told() -> None:
    crash = r'{"event": "crashed", "level": "error", "exception": "Traceback\n  File x\nOSError: no space left"}'
    assert cause_of([STARTED, crash], "kvbm") == "crashed: OSError: no space left (the log holds the traceback)"


def test_what_is_no_log_is_told_as_it_is() -> None:
    assert cause_of([STARTED, "Traceback ..", "ImportError: no numba", ""], "indexer") == "ImportError: no numba"


def test_a_hint_is_not_the_cause() -> None:
    lines = ["kvbus kvbm: error: g2_bytes must be above 0", "kvbus kvbm --help tells what there is."]
    assert cause_of(lines, "kvbm") == lines[0]


def test_who_was_killed_has_said_nothing_of_it() -> None:
    assert cause_of([STARTED], "router") == ""
    assert cause_of([], "router") == ""
