"""Whom a request counts for, where turns and limits are shared between tenants.

A salt (the header ``x-tenant-id``, or the body) is what a client says of itself, or a gateway of its clients. A key is what it has
proved. Who shares cached blocks is another question, which only the salt decides.
"""

from collections.abc import Mapping
from enum import StrEnum
from hashlib import sha256


class TenantSource(StrEnum):
    """``auto``: the salt, else the key."""

    AUTO = "auto"
    SALT = "salt"
    KEY = "key"


def given_key(headers: Mapping[str, str]) -> bytes:
    """The API key that a request brings along; empty without one."""
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    key = given.strip() if scheme.lower() == "bearer" else headers.get("X-Api-Key", "")
    return key.encode(errors="surrogateescape")


def key_name(key: bytes) -> str:
    """What an API key is called where it must not be read: ``key-`` and the first 12 digits of its SHA-256."""
    return f"key-{sha256(key).hexdigest()[:12]}"


def tenant_of(salt: str, client: str, source: str) -> str:
    """``client``: the name of the key that the request came with, "" without keys."""
    if source == TenantSource.KEY:
        return client
    return salt or (client if source == TenantSource.AUTO else "")
