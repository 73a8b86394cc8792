"""Items of the Responses API as clients send them. Fields that do not belong to an item's type are ignored, null is "not given"."""

import mimetypes
from typing import Any

import msgspec

from kvbus_protocols.conversation import ImagePart, TextPart
from kvbus_protocols.errors import InvalidRequest

ROLES = ("assistant", "system", "developer", "user")
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
HOSTED = frozenset(
    {
        "code_interpreter_call", "computer_call", "computer_call_output", "file_search_call", "image_generation_call",
        "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools", "program", "program_output",
        "web_search_call",
    }
)  # fmt: skip
"""What tools did that a server runs: accepted in a history, and not shown to the model, whose tools they are not."""


class ItemContent(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None
    file_url: str | None = None
    file_data: str | None = None
    filename: str | None = None


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """Any item; ``type`` may be missing for a message. ``arguments``: JSON text, for a tool_search_call an object; for a
    local_shell_call there is an ``action`` instead."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[ItemContent] | None = None
    call_id: str | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    action: dict[str, Any] | None = None
    input: str | None = None
    output: str | list[ItemContent] | None = None
    summary: list[ItemContent] | None = None
    encrypted_content: str | None = None
    tools: list[dict[str, Any]] | None = None

    @property
    def kind(self) -> str:
        if self.type is not None:
            return self.type
        return "item_reference" if self.role is None and self.content is None and self.id is not None else "message"


def content_parts(content: str | list[ItemContent] | None, where: str) -> tuple[TextPart | ImagePart, ...]:
    """Raise InvalidRequest. ``where``: the path of the content in the request."""
    if content is None:
        return ()
    if isinstance(content, str):
        return (TextPart(content),) if content else ()
    return tuple(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: ItemContent, where: str) -> TextPart | ImagePart:
    if part.type in TEXTS:
        if part.text is None:
            raise missing(f"{where}.text")
        return TextPart(part.text)
    if part.type == "refusal":
        return TextPart(part.refusal or "")
    if part.type not in ("input_image", "input_file"):
        raise InvalidRequest(
            f"Content of the type '{part.type}' is not supported.", param=f"{where}.type", code="unsupported_content"
        )
    if part.file_id is not None:
        raise InvalidRequest("This server stores no files.", param=f"{where}.file_id", code="unsupported")
    if part.type == "input_image":
        if not part.image_url:
            raise missing(f"{where}.image_url")
        return ImagePart(part.image_url)
    url = part.file_data or part.file_url
    if not url:
        raise missing(f"{where}.file_data")
    return ImagePart(url, _media_type(url, part.filename))


def _media_type(url: str, filename: str | None) -> str:
    if url.startswith("data:"):
        return url[5:].partition(",")[0].partition(";")[0] or "file"
    return mimetypes.guess_type(filename or url)[0] or "file"


def joined_text(content: list[ItemContent] | None, separator: str = "") -> str:
    return separator.join(part.text for part in content or () if part.text)


def missing(param: str) -> InvalidRequest:
    return InvalidRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
