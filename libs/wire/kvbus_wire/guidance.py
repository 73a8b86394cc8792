"""What an output has to look like, in terms that every engine can map to the grammar library it has.

    output  =  block*  answer          block: free text between two markers (the model's thoughts)
    answer  =  lead  text  tail        text: by ``form``
            |  section                 section: the calls, where there are any to choose from
    section =  begin  call  (separator  call)*  end

In the form ``free`` an answer is text with sections anywhere in it; in the form ``none`` it is a section.
Markers are given as text. Where the model's vocabulary has a special token of that spelling, the token is meant.
"""

from typing import Literal

from kvbus_wire.message import Part

ValueKind = Literal["json", "text", "regex", "lark"]
TextForm = Literal["none", "free", "json_object", "json_schema", "regex", "lark"]


class FreeBlock(Part, frozen=True):
    """Text that is let through, markers included. It may not be left but by ``end``, with white space after it."""

    begin: str
    end: str


class GuidedArgument(Part, frozen=True):
    """An argument that is written as an element. ``kind``: json, by the JSON Schema ``text``; regex or lark, by the pattern or
    grammar ``text``; text, anything up to ``end``."""

    begin: str
    kind: ValueKind
    end: str
    text: str = ""
    required: bool = False


class GuidedCall(Part, frozen=True):
    """One of the calls to choose from: ``begin``, content, ``end``. The content is JSON by ``schema`` or, where that is empty, the
    elements ``arguments`` in their order; with ``any_content`` anything up to ``end``.

    ``strict``: refuse a schema that can be followed in part only. ``param``: the field of the request that the schema came from.
    """

    begin: str
    end: str
    schema: str = ""
    arguments: tuple[GuidedArgument, ...] = ()
    any_content: bool = False
    strict: bool = False
    param: str = ""


class CallSection(Part, frozen=True):
    """``trigger``: how ``begin`` and the first call begin; free text ends there. ``parallel``: more than one call may follow."""

    calls: tuple[GuidedCall, ...]
    begin: str = ""
    end: str = ""
    separator: str = ""
    trigger: str = ""
    parallel: bool = True


class Guidance(Part, frozen=True):
    """``text``: the JSON Schema, pattern or grammar (Lark, as llguidance reads it) of the form.

    ``strict``, ``param``: as in GuidedCall.
    ``open_block``: the prompt has begun the first of the blocks, which then has to end; otherwise blocks may be left out.
    """

    form: TextForm
    text: str = ""
    strict: bool = False
    param: str = ""
    section: CallSection | None = None
    blocks: tuple[FreeBlock, ...] = ()
    open_block: bool = False
    lead: str = ""
    tail: str = ""
