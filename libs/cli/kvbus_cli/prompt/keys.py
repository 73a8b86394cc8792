"""The block keys of a prompt that is given as text, as tokens, or as the body of a request: a frontend makes them."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvbus_cli.prompt.client import fetch_prompt
from kvbus_cli.prompt.request_file import BadRequestFile, RequestFile, read_request, request_headers
from kvbus_cli.server_address import DEFAULT_URL
from kvbus_cli.tool import ToolSettings
from kvbus_runtime.settings import Flag


class PromptSettings(ToolSettings, frozen=True, kw_only=True):
    """A prompt in one of three forms, and the frontend that makes its block keys."""

    messages: Annotated[str, Flag("a request's body (JSON; - is the standard input)", metavar="FILE")] = ""
    text: Annotated[str, Flag("a prompt as it is, without a chat template")] = ""
    tokens: Annotated[str, Flag("a prompt as token ids, separated by commas", metavar="IDS")] = ""
    model: Annotated[str, Flag("model of the prompt (empty: that of the body)", metavar="NAME")] = ""
    url: Annotated[str, Flag("a frontend, which makes the block keys of the prompt")] = DEFAULT_URL
    api_key: Annotated[str, Flag("sent to it as bearer token", secret=True)] = ""
    header: Annotated[tuple[str, ...], Flag("headers of the request", metavar="NAME:VALUE,..")] = ()
    tenant: Annotated[str, Flag("cache salt of the request: the header x-tenant-id", metavar="SALT")] = ""

    @property
    def request(self) -> RequestFile:
        """Raise BadRequestFile."""
        return request_of(model=self.model, text=self.text, tokens=self.tokens, messages=self.messages)

    @property
    def headers(self) -> dict[str, str]:
        """Of the request. Raise BadRequestFile."""
        tenant = {"X-Tenant-Id": self.tenant} if self.tenant else {}
        return request_headers(self.header, self.api_key) | tenant


class KeyedPrompt(msgspec.Struct, frozen=True):
    """``model``: as the workers call it; ``tokens``: of the whole prompt; ``keys``: packed, of its whole blocks;
    ``context_length``: tokens that prompt and answer may have."""

    model: str
    tokens: int
    block_size: int
    keys: bytes
    context_length: int


def request_of(*, model: str, text: str, tokens: str, messages: str) -> RequestFile:
    """The request that asks for the prompt, from whichever of the three was given: ``text`` as it is, without a chat template;
    ``tokens``: ids, separated by commas or blanks; ``messages``: a file with a request's body (- is the standard input).
    ``model`` wins over that in the file. Raise BadRequestFile."""
    if sum(map(bool, (text, tokens, messages))) != 1:
        raise BadRequestFile("give one of --text, --tokens and --messages")
    if messages:
        request = read_request(messages, None)
        fields = {**request.fields, **({"model": model} if model else {})}
        if not fields.get("model"):
            raise BadRequestFile(f"{messages} names no model: give --model")
        return msgspec.structs.replace(request, body=msgspec.json.encode(fields), fields=fields)
    if not model:
        raise BadRequestFile("give --model")
    nvext: dict[str, Any] = {"use_raw_prompt": True}
    if tokens:
        try:
            nvext = {"token_data": [int(token) for token in tokens.replace(",", " ").split()]}
        except ValueError as problem:
            raise BadRequestFile(f"--tokens takes numbers: {problem}") from problem
    fields = {"model": model, "messages": [{"role": "user", "content": text}], "nvext": nvext}
    return RequestFile("--tokens" if tokens else "--text", msgspec.json.encode(fields), fields, "chat")


def keyed_prompt(url: str, request: RequestFile, headers: Mapping[str, str]) -> KeyedPrompt:
    """Ask the frontend at ``url``. Raise PromptFailed."""
    view = fetch_prompt(url, request, headers)
    keys = b"".join(bytes.fromhex(block.key) for block in view.blocks)
    return KeyedPrompt(view.served_model, view.count, view.block_size, keys, view.max_model_len)
