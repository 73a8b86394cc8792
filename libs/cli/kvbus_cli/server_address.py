"""The address of a running server's HTTP API, as it is given to verbs. Standard library only."""

import http.client
from urllib.parse import urlsplit

DEFAULT_URL = "http://127.0.0.1:8000"


class ServerAddress:
    """``text``: a URL, or one without ``http://``. Raise ValueError for what is none."""

    def __init__(self, text: str) -> None:
        self._parts = urlsplit(text if "://" in text else f"http://{text}")

    @property
    def url(self) -> str:
        return self._parts.geturl()

    def path(self, path: str) -> str:
        """What to ask for: the API may lie below a path of its own."""
        return self._parts.path.rstrip("/") + path

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """Not opened yet. Raise ValueError, http.client.InvalidURL."""
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=timeout_s)
