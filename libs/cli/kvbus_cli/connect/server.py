"""Asks a running server for its models."""

import http.client
from typing import TypeVar
from urllib.parse import quote

import msgspec

from kvbus_cli.connect.catalog import ListedModel, ModelList, NoChoice, chosen_model
from kvbus_cli.server_address import ServerAddress

TIMEOUT_S = 10.0
_LONGEST_LIST = 16 << 20

T = TypeVar("T")


class ServerSilent(Exception):
    """There is no answer, or none that can be used; the text is one line."""


def base_url(text: str) -> str:
    """The address of a server without a path that clients add by themselves."""
    url = text if "://" in text else f"http://{text}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def model_at(url: str, key: str, name: str) -> ListedModel:
    """``url`` as `base_url` gives it; ``key`` and ``name`` may be empty. Raise ServerSilent, NoChoice.

    A server may know names that it does not list, such as with an alias for any name.
    """
    models = _answer(url, key, "/v1/models", ModelList).data
    try:
        return chosen_model(models, name)
    except NoChoice:
        found = _unlisted_model(url, key, name) if models and name else None
        if found is None:
            raise
        return found


def _unlisted_model(url: str, key: str, name: str) -> ListedModel | None:
    try:
        found = _answer(url, key, f"/v1/models/{quote(name)}", ListedModel)
    except _Refused as refused:
        if refused.status in (http.client.NOT_FOUND, http.client.METHOD_NOT_ALLOWED):
            return None
        raise
    return found if found.id == name else None


class _Refused(ServerSilent):
    def __init__(self, url: str, status: int) -> None:
        super().__init__(f"{url} answers with HTTP {status}")
        self.status = status


def _answer(url: str, key: str, path: str, kind: type[T]) -> T:
    try:
        address = ServerAddress(url)
        connection = address.connection(TIMEOUT_S)
    except (ValueError, http.client.InvalidURL) as error:
        raise ServerSilent(f"{url} is no address: {error}") from error
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request("GET", address.path(path), headers=headers)
        response = connection.getresponse()
        status, body = response.status, response.read(_LONGEST_LIST)
    except ValueError as error:
        raise ServerSilent(f"{url} cannot be asked: the address or the key has characters that HTTP has not") from error
    except (OSError, http.client.HTTPException) as error:
        raise ServerSilent(f"no server answers at {url}: {error}") from error
    finally:
        connection.close()
    if status == http.client.UNAUTHORIZED:
        raise ServerSilent(f"{url} wants another API key (--api-key, --api-key-env)")
    if status != http.client.OK:
        raise _Refused(url, status)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ServerSilent(f"what {url} says of its models cannot be read: {error}") from error
