"""structlog for a process: console on a terminal, JSON elsewhere; records of other libraries join in the same form."""

import logging
import sys
import time
from collections.abc import Callable
from math import inf
from typing import Any

import structlog

REPEAT_S = 60.0

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(level: str, log_format: str) -> None:
    """Set up the process's logs (on standard error). Call once, from the program; libraries and tests leave it alone."""
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if console:
        last: list[Any] = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, _LEVELS[level]))


def get_logger(**fields: Any) -> Any:
    return structlog.get_logger().bind(**fields)


class Seldom:
    """For a line that others can provoke as often as they like: one per ``interval_s`` has its turn, the others are counted."""

    def __init__(self, interval_s: float = REPEAT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._last = -inf
        self._held_back = 0

    def turn(self) -> int | None:
        """How many lines were held back since the last turn; None: hold back this one, too."""
        now = self._clock()
        if now < self._last + self._interval_s:
            self._held_back += 1
            return None
        held_back, self._held_back, self._last = self._held_back, 0, now
        return held_back
