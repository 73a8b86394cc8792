"""Asks a running server for its models."""

import http.client

import msgspec

from kvbus_cli.connect.catalog import ListedModel, ModelList
from kvbus_cli.server_address import ServerAddress

TIMEOUT_S = 10.0
_LONGEST_LIST = 16 << 20


class ServerSilent(Exception):
    """There is no answer, or none that can be used; the text is one line."""


def base_url(text: str) -> str:
    """The address of a server without a path that clients add by themselves."""
    url = text if "://" in text else f"http://{text}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def listed_models(url: str, key: str) -> tuple[ListedModel, ...]:
    """``url`` as `base_url` gives it; ``key`` may be empty. Raise ServerSilent."""
    try:
        address = ServerAddress(url)
        connection = address.connection(TIMEOUT_S)
    except (ValueError, http.client.InvalidURL) as error:
        raise ServerSilent(f"{url} is no address: {error}") from error
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request("GET", address.path("/v1/models"), headers=headers)
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
        raise ServerSilent(f"{url} answers with HTTP {status}")
    try:
        return msgspec.json.decode(body, type=ModelList).data
    except (msgspec.DecodeError, RecursionError) as error:
        raise ServerSilent(f"the list of models at {url} cannot be read: {error}") from error
