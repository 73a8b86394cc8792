"""Content blocks of Messages requests as parts of turns."""

import json
from collections.abc import Sequence

from kvbus_protocols.conversation import (
    ImagePart,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
)
from kvbus_protocols.errors import InvalidRequest
from kvbus_protocols.messages import (
    Base64Source,
    BlockParam,
    ContentSource,
    DocumentParam,
    FileSource,
    ImageParam,
    PlainTextSource,
    RedactedThinkingParam,
    SearchResultParam,
    ServerRunParam,
    TextParam,
    ThinkingParam,
    ToolReferenceParam,
    ToolResultParam,
    ToolUseParam,
    UrlSource,
)
from kvbus_protocols.messages_echo import call_id_of, signed_thought
from kvbus_protocols.tool_listing import ToolListing


def user_parts(block: BlockParam, where: str) -> Sequence[TextPart | ImagePart]:
    """Of a block that is no tool result. ``where``: its path, for errors. Raise InvalidRequest."""
    match block:
        case TextParam():
            return text_parts(block.text)
        case ImageParam():
            return (_file(block.source, "image", where),)
        case DocumentParam():
            return _document(block, where)
        case SearchResultParam():
            texts = [block.title, block.source, *(part.text for part in block.content)]
            return text_parts("\n".join(text for text in texts if text))
        case _:
            raise _misplaced(block, where, "assistant")


def assistant_parts(block: BlockParam, where: str) -> Sequence[Part]:
    """Raise InvalidRequest."""
    match block:
        case TextParam():
            return text_parts(block.text)
        case ThinkingParam():
            thought = block.thinking or signed_thought(block.signature)
            return (ReasoningPart(thought),) if thought else ()
        case RedactedThinkingParam() | ServerRunParam():
            return ()  # another server's secret, or its doing
        case ToolUseParam():
            return (ToolCallPart(call_id_of(block.id), block.name, _arguments(block, where)),)
        case _:
            raise _misplaced(block, where, "user")


def result_parts(block: ToolResultParam, where: str, listing: ToolListing) -> Sequence[ToolResultPart]:
    """``listing``: knows the tools that references may stand for. Raise InvalidRequest."""
    parts: list[TextPart | ImagePart] = []
    found: list[str] = []
    content = [TextParam(text=block.content)] if isinstance(block.content, str) else block.content or []
    for i, inner in enumerate(content):
        if isinstance(inner, ToolReferenceParam):
            found.append(inner.tool_name)
            continue
        parts += text_parts(listing.of_names(found))
        found = []
        parts += user_parts(inner, f"{where}.content.{i}")
    parts += text_parts(listing.of_names(found))
    return (ToolResultPart(call_id_of(block.tool_use_id), tuple(parts), bool(block.is_error)),)


def text_parts(text: str) -> Sequence[TextPart]:
    return (TextPart(text),) if text else ()


def _arguments(block: ToolUseParam, where: str) -> str:
    """Parsed and written anew, so that it does not matter how the client writes JSON."""
    try:
        return json.dumps(block.input, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidRequest(f"{where}.input: nested too deeply", param=where, code="nesting_too_deep") from error


def _document(block: DocumentParam, where: str) -> Sequence[TextPart | ImagePart]:
    head = text_parts("\n".join(text for text in (block.title, block.context) if text))
    match block.source:
        case PlainTextSource(data):
            return (*head, *text_parts(data))
        case ContentSource(content):
            inner = [TextParam(text=content)] if isinstance(content, str) else content
            parts = [user_parts(part, f"{where}.source.content.{i}") for i, part in enumerate(inner)]
            return (*head, *(part for found in parts for part in found))
        case Base64Source(media_type):
            return (*head, _file(block.source, media_type, where))
        case source:
            return (*head, _file(source, "application/pdf", where))


def _file(source: Base64Source | UrlSource | FileSource, what: str, where: str) -> ImagePart:
    match source:
        case Base64Source(media_type, data):
            return ImagePart(f"data:{media_type};base64,{data}", what)
        case UrlSource(url):
            return ImagePart(url, what)
        case FileSource():
            raise InvalidRequest(
                f"{where}.source: files are not stored by this server; send the content as base64, text or url",
                param=f"{where}.source",
                code="unsupported",
            )


def _misplaced(block: BlockParam, where: str, role: str) -> InvalidRequest:
    kind = type(block).__struct_config__.tag
    return InvalidRequest(f"{where}: `{kind}` blocks can only be in `{role}` messages", param=where)
