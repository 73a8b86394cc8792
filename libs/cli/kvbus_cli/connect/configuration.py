"""What a client's configuration is made from, and what it consists of."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

Api = Literal["chat", "responses", "messages"]

PROVIDER = "kvbus"
"""The name under which clients list the server."""

PLACEHOLDER_KEY = "local"
"""Clients want a key even where the server asks for none."""


class ApiKey(msgspec.Struct, frozen=True):
    """``text``: the key itself; with a ``variable``, it is the value of that environment variable and appears nowhere."""

    text: str = PLACEHOLDER_KEY
    variable: str = ""

    @property
    def is_placeholder(self) -> bool:
        return not self.variable and self.text == PLACEHOLDER_KEY

    def written(self, reference: str) -> str:
        """The key as a file has it. ``reference``: how that file refers to the variable ``{}``."""
        return reference.format(self.variable) if self.variable else self.text


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """A server, and one of its models. ``url``: without ``/v1``. ``home``: the folder that a client's files lie below,
    unless a variable of its ``environment`` names another place.

    ``context_tokens``: prompt and answer together. ``output_tokens``: what a client is to leave for an answer.
    ``efforts``: reasoning efforts that make a difference to the model.
    """

    url: str
    model: str
    context_tokens: int
    output_tokens: int
    home: str
    api: Api = "chat"
    reasons: bool = False
    efforts: tuple[str, ...] = ()
    key: ApiKey = ApiKey()
    environment: Mapping[str, str] = {}

    @property
    def v1_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def base_url(self) -> str:
        """As clients want it who add the rest of the path by themselves: Anthropic's add ``/v1``, OpenAI's do not."""
        return self.url if self.api == "messages" else self.v1_url


class ConfigFile(msgspec.Struct, frozen=True, kw_only=True):
    """``path``: below the home folder, or a full one. ``owned``: the file is kvbus's alone, so it is replaced, not merged.

    ``instead_of_variables``: it holds the configuration's variables, so that only one of the two is needed.
    """

    path: str
    format: Literal["json", "toml", "env"] = "json"
    content: Mapping[str, Any]
    owned: bool = False
    instead_of_variables: bool = False


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """``variables``: to be exported before the start. ``key_variable``: the one that has to hold the API key.

    ``written_command``: how it starts when its variables are in a file, if that differs.
    """

    command: str
    variables: Mapping[str, str] = {}
    key_variable: str = ""
    files: tuple[ConfigFile, ...] = ()
    written_command: str = ""

    def exports(self, key: ApiKey) -> dict[str, str]:
        """All variables with what a shell puts in their place, the key's value only where it was given as such."""
        found = dict(self.variables)
        if self.key_variable and self.key_variable != key.variable:
            found[self.key_variable] = key.written("${}")
        return found


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """``apis``: those that it speaks, the best one first. ``first_prompt_tokens``: about as many has its shortest first prompt."""

    name: str
    title: str
    apis: tuple[Api, ...]
    first_prompt_tokens: int
    configure: Callable[[Connection], Configuration]
