"""What a frontend would ask the router for a request's body and headers. Pure."""

import msgspec

from kvbus_cli.prompt.keys import KeyedPrompt
from kvbus_cli.prompt.request_file import BadRequestFile, RequestFile
from kvbus_protocols.chat import ChatRequest
from kvbus_protocols.decoding import RequestDecoder
from kvbus_protocols.errors import InvalidRequest
from kvbus_protocols.extensions import NvExt, RoutingConstraints
from kvbus_protocols.generation import GenerationRequest
from kvbus_protocols.headers import read_headers, with_headers
from kvbus_protocols.messages import MessagesRequest
from kvbus_protocols.messages_turns import messages_conversation
from kvbus_protocols.prompt_view import PromptApi
from kvbus_protocols.responses.request import ResponsesRequest
from kvbus_wire.request import AgentHints, SessionRef
from kvbus_wire.router import RouteRequest

_TYPES: dict[PromptApi, type[GenerationRequest]] = {
    "chat": ChatRequest,
    "messages": MessagesRequest,
    "responses": ResponsesRequest,
}


def generation_of(request: RequestFile, headers: dict[str, str]) -> GenerationRequest:
    """The request with what its headers add. Raise BadRequestFile."""
    try:
        given = with_headers(RequestDecoder(_TYPES[request.api]).decode(request.body), read_headers(headers))
        # The session of Claude Code stands in its metadata.
        return messages_conversation(given).generation if isinstance(given, MessagesRequest) else given
    except InvalidRequest as problem:
        raise BadRequestFile(f"{request.name} is no request of the API '{request.api}': {problem}") from problem


def route_request(prompt: KeyedPrompt, asked: GenerationRequest, deadline_ms: int) -> RouteRequest:
    """``deadline_ms``: unix milliseconds. The tenant is that of a frontend that takes the salt for it (`--tenant-source`)."""
    nvext = asked.nvext or NvExt()
    constraints = nvext.routing_constraints or RoutingConstraints()
    left = max(prompt.context_length - prompt.tokens, 1)
    return RouteRequest(
        request_id="explain",
        model=prompt.model,
        keys=prompt.keys,
        prompt_tokens=prompt.tokens,
        max_tokens=min(asked.token_limit or left, left),
        deadline_ms=deadline_ms,
        hints=_hints(nvext),
        session=_session(asked),
        tenant=nvext.cache_salt or asked.cache_salt or "",
        pinned=nvext.pin,
        required_taints=tuple(constraints.required_taints or ()),
        preferred_taints=constraints.preferred_taints or {},
    )


def _hints(nvext: NvExt) -> AgentHints:
    """Those that were given; the wire's names are the same."""
    given = nvext.agent_hints
    values = {} if given is None else msgspec.structs.asdict(given)
    return AgentHints(**{name: value for name, value in values.items() if value is not None})


def _session(asked: GenerationRequest) -> SessionRef | None:
    given = asked.kvbus.session if asked.kvbus is not None else None
    return None if given is None else SessionRef(**msgspec.structs.asdict(given))
