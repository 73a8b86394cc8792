"""``POST /v1/tokenize`` and ``POST /v1/detokenize``, as other open servers have them."""

from typing import Any

import msgspec

from kvbus_protocols.chat import ChatMessage, Tool
from kvbus_protocols.errors import InvalidRequest
from kvbus_protocols.extensions import UInt32


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Either ``prompt`` or ``messages``."""

    model: str
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raise InvalidRequest for what the types alone cannot say."""
        if (self.prompt is None) == (not self.messages):
            raise InvalidRequest("Give either 'prompt' or 'messages'.", param="prompt")


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    tokens: list[UInt32]


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str
