"""`POST /v1/prompt` of a running server. Blocking, standard library only."""

import http.client
from collections.abc import Mapping

import msgspec

from kvbus_cli.prompt.request_file import RequestFile
from kvbus_cli.server_address import ServerAddress
from kvbus_protocols.prompt_view import PromptView

PATH = "/v1/prompt"
TIMEOUT_S = 120.0
_SHOWN_CHARS = 300


class PromptFailed(Exception):
    """No server, an old one, or one that refused; the text is for the person at the terminal."""


class _Error(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


def fetch_prompt(url: str, request: RequestFile, headers: Mapping[str, str]) -> PromptView:
    """Raise PromptFailed."""
    try:
        address = ServerAddress(url)
        connection = address.connection(TIMEOUT_S)
        try:
            target = address.path(f"{PATH}?api={request.api}")
            connection.request("POST", target, request.body, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            status, data = response.status, response.read()
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
        raise PromptFailed(f"{url} does not answer: {reason} (--url: where the HTTP API is)") from problem
    if status != 200:
        raise PromptFailed(_refusal(url, request, status, data))
    try:
        return msgspec.json.decode(data, type=PromptView)
    except msgspec.DecodeError as problem:
        raise PromptFailed(f"{url} answers with something else than a prompt: {problem}") from problem


def _refusal(url: str, request: RequestFile, status: int, data: bytes) -> str:
    try:
        error = msgspec.json.decode(data, type=_ErrorBody).error
    except msgspec.DecodeError:
        error = _Error(data[:_SHOWN_CHARS].decode(errors="replace").strip())
    if status == 405 or (status == 404 and error.code in (None, "not_found")):
        return f"the server at {url} has no {PATH}: it is no kvbus frontend, or an older one"
    message = " ".join(error.message.split())
    return f"{request.name} is refused as a request of the API '{request.api}' (HTTP {status}): {message}"
