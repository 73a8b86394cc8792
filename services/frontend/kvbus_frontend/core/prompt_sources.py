"""Which field of a request each piece of its prompt comes from: it is rendered once more with marks in it (`core.field_marks`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvbus_frontend.core.conversation import FindWritten
from kvbus_frontend.core.field_marks import Field, Located, Marking, Reseal, Span, unmarked_text
from kvbus_frontend.core.written_calls import WrittenCall
from kvbus_protocols.errors import ApiError

RENDERINGS = 12
"""A request is rendered at most so often, each time with fewer marks."""


class Sources(msgspec.Struct, frozen=True):
    """``spans``: in order, without overlaps. ``not_shown``: fields whose text is not in the prompt; None: that is not known."""

    spans: tuple[Span, ...] = ()
    not_shown: tuple[str, ...] | None = None


RenderMarked = Callable[[dict[str, Any], Marking], str]
"""The prompt's text of a marked document. Raise ApiError."""


def sources_of(
    document: Mapping[str, Any], text: str, render: RenderMarked, *, changed: Mapping[str, str], reseal: Reseal
) -> Sources:
    """``text``: the prompt. A field that does not survive its marks is left without; what stands behind the first place at which
    the marked prompt is another one all the same is of unknown source.
    """
    kept: set[str] = set()
    schemas, best, best_end = True, Located("", (), ()), -1
    for _ in range(RENDERINGS):
        marking = Marking(taken=text, kept=kept, schemas=schemas, changed=changed, reseal=reseal)
        try:
            found = marking.located(render(marking.document(document), marking))
        except RecursionError:  # what is read by C may be deeper than what can be walked
            break
        except ApiError:  # something looks at what it should not: at types within schemas, or at names
            if not schemas:
                break
            schemas = False
            continue
        if found.text == text:
            return Sources(_filled(found.spans), _not_shown(marking.fields, found.spans))
        end = _common(found.text, text)
        if end > best_end:
            best, best_end = found, end
        culprits = [field for field in found.beside(end) if field.path not in kept]
        if schemas and any(field.in_schema for field in culprits):
            schemas = False
        elif culprits:
            kept.update(field.path for field in culprits)
        else:
            break
    return Sources(_filled([span for span in best.spans if span.end <= best_end]))


def marked_finder(
    find_written: FindWritten, marking: Marking, on_found: Callable[[str, WrittenCall], None]
) -> FindWritten:
    """Looks for calls by what they are without marks. ``on_found``: is told the path of each that stands as the model wrote it and
    not as the client sent it; "" where that is not known."""

    def find(call_id: str, name: str, arguments: str) -> WrittenCall | None:
        written = find_written(call_id, unmarked_text(name), unmarked_text(arguments))
        if written is None:
            return None
        path = marking.call(name)
        if written.arguments != unmarked_text(arguments):
            on_found(path, written)
        return marking.as_written(path, written)

    return find


def _common(a: str, b: str) -> int:
    """How many characters both begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _filled(spans: Sequence[Span]) -> tuple[Span, ...]:
    """What stands between two texts of one tool or one call is how the template writes that tool or call. Where a text of it comes
    up again (its name, in the message with its result), something else has begun."""
    filled: list[Span] = []
    seen: set[str] = set()
    for span in spans:
        before, field = filled[-1] if filled else None, span.field
        same = before is not None and before.field == field and not field.text
        follows = before is not None and before.field.owner == field.owner != ""
        if before is not None and follows and before.end < span.start and (same or field.path not in seen):
            filled.append(Span(before.end, span.start, Field(field.path if same else field.owner, field.owner)))
        seen.add(field.path)
        filled.append(span)
    return tuple(filled)


def _not_shown(fields: Sequence[Field], spans: Sequence[Span]) -> tuple[str, ...]:
    """Of a tool or call of which nothing is shown its own path. A text that another field shows is shown (a thought may stand in a
    block and in its signature)."""
    shown = {span.field.path for span in spans}
    owners = {span.field.owner for span in spans}
    texts = {"", *(span.field.text for span in spans)}
    hidden = (
        field.owner or field.path
        for field in fields
        if (field.owner not in owners if field.owner else field.path not in shown and field.text not in texts)
    )
    return tuple(dict.fromkeys(hidden))
