"""Asking a service whether it is ready."""

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import msgspec

_MAX_BODY_BYTES = 1 << 20


class Answer(msgspec.Struct, frozen=True):
    """``waits_for``: what the service itself says is missing ("" when it says nothing)."""

    ready: bool
    waits_for: str = ""


def probe(url: str, timeout_s: float = 2.0) -> Answer:
    """Blocking; no answer is "not ready"."""
    status, body = _get(url, timeout_s)
    return Answer(status == 200, waits_for(body))


def model_names(base_url: str, timeout_s: float = 5.0) -> tuple[str, ...]:
    """What the HTTP API serves; () when it does not say."""
    _, body = _get(f"{base_url}/v1/models", timeout_s)
    try:
        return tuple(model.id for model in msgspec.json.decode(body, type=_ModelList).data)
    except msgspec.DecodeError:
        return ()


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


def _get(url: str, timeout_s: float) -> tuple[int, bytes]:
    """Status 0: no answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", parts.path)
        response = connection.getresponse()
        return response.status, response.read(_MAX_BODY_BYTES)
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def waits_for(body: bytes) -> str:
    """The first check that is not ok, with its detail, from the body of /readyz."""
    try:
        document: Any = json.loads(body)
    except ValueError:
        return ""
    checks = document.get("checks") if isinstance(document, dict) else None
    if not isinstance(checks, dict):
        return ""
    for name, check in checks.items():
        if isinstance(check, dict) and not check.get("ok", True):
            detail = str(check.get("detail") or "")
            return f"{name}: {detail}" if detail else str(name)
    return ""
