"""Mistral, all tokenizer versions, told apart by what follows the marker.

[TOOL_CALLS][{"name": …, "arguments": …}, …][/TOOL_CALLS]      up to version 10; the closer is optional
[TOOL_CALLS]NAME{…}                                            version 11
[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{…}                           version 13; the id is optional
"""

import re
import secrets
import string

from kvbus_parsers.grammar import Context, ToolFormat
from kvbus_parsers.json_calls import CallEnd, CallKeys, broken_rest, call_or_array, named_call
from kvbus_parsers.markup import cut_off
from kvbus_parsers.python_calls import NAME
from kvbus_parsers.source import Step, markers

_OPENER, _CLOSER, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[/TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_STOPS = markers(_OPENER, _CLOSER)
_CLOSING = markers(_CLOSER)
_BEHIND_NAME = markers(_ARGUMENTS, _ID)
_ID_TEXT = re.compile(r"[\w-]*+")
_KEYS = CallKeys()


def _read(context: Context, opener: str) -> Step[bool]:
    source, sink = context.source, context.sink
    recording = source.record()
    yield from source.skip_space()
    if (yield from source.ahead("[{")):
        source.keep(recording)
        ended = yield from call_or_array(context, _KEYS, _STOPS)
        if ended is CallEnd.REJECTED:
            yield from broken_rest(context, _STOPS)
    else:
        name = yield from source.take_while(NAME)
        yield from source.skip_space()
        call_id = ""
        if (yield from source.literal(_ID)):
            call_id = yield from source.take_while(_ID_TEXT)
            yield from source.skip_space()
        if not name or not ((yield from source.literal(_ARGUMENTS)) or (yield from source.peek()) == "{"):
            yield from cut_off(context, _BEHIND_NAME)
            return source.dismiss(recording)
        source.keep(recording)
        yield from named_call(context, name, _STOPS, call_id)
    space = yield from source.skip_space()
    if not (yield from source.one_of(_CLOSING)):
        source.unread(space)
    sink.marker()
    return True


def new_id() -> str:
    """Mistral's templates refuse ids of any other shape."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


FORMATS = (ToolFormat("mistral", (_OPENER,), _read, strays=(_CLOSER,), new_id=new_id),)
