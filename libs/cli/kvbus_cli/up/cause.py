"""Why a service has ended, in one line, from the end of its log. The log itself stays where it is."""

from collections.abc import Sequence
from typing import Any

import msgspec

_HINTS = {
    "bad_settings": "see `kvbus {service} --help`",
    "superseded": "two processes have the same instance id",
    "unsupported_server": "see `kvbus doctor`",
    "crashed": "the log holds the traceback",
}
_SEVERE = ("error", "critical")
_LONGEST_CHARS = 500


def cause_of(lines: Sequence[str], service: str) -> str:
    """What the newest line of an error says, else the last line that is no line of a log (a traceback's end, say); "" when the
    service has complained of nothing, as one that was killed."""
    entries = [(line, _entry(line)) for line in lines if line.strip()]
    for _, entry in reversed(entries):
        if entry is not None and entry.get("level") in _SEVERE:
            return _told(entry, service)[:_LONGEST_CHARS]
    plain = [line for line, entry in entries if entry is None]
    plain = [line for line in plain if ": error: " in line] or plain  # a hint follows what a command line says is wrong
    return plain[-1].strip()[:_LONGEST_CHARS] if plain else ""


def _told(entry: dict[str, Any], service: str) -> str:
    event = str(entry.get("event", ""))
    exception = str(entry.get("exception") or "").strip().splitlines()
    what = entry.get("error") or entry.get("reason") or (exception[-1].strip(" |+-") if exception else "")
    words = event.replace("_", " ")
    hint = _HINTS.get(event, "").format(service=service)
    return (f"{words}: {what}" if what else words) + (f" ({hint})" if hint else "")


def _entry(line: str) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
