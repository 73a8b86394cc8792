"""User and password, NKey, credentials, TLS and client certificates against real servers; and servers that are too old."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nkeys  # type: ignore[import-untyped]
import pytest

from kvbus_runtime.bus import RequestContext, open_bus
from kvbus_runtime.errors import UnsupportedServer
from kvbus_runtime.link import connect_options
from kvbus_runtime.settings import BadSettings, CommonSettings
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.timing import scaled
from kvbus_wire.message import Message
from kvbus_wire.worker import Cancel, Done

WAIT_S = scaled(10)
SEED = b"SUAMLK2ZNL35WSMW37E7UD4VZ7ELPKW7DHC3BWBSD2GCZ7IUQQXZIORRBU"


async def works(settings: CommonSettings) -> None:
    """Connect, subscribe, request."""

    async def handler(message: Message, context: RequestContext) -> Message:
        return Done()

    async with open_bus(settings, name="client", connect_timeout_s=WAIT_S) as bus:
        await bus.serve(bus.subjects.control("w"), [Cancel], handler)
        request = Cancel(request_id="r", reason="x")
        assert await bus.request(bus.subjects.control("w"), request, Done, timeout_s=WAIT_S) == Done()


async def is_refused(settings: CommonSettings) -> None:
    with pytest.raises(TimeoutError):
        async with open_bus(settings, name="client", connect_timeout_s=1.0):
            pass


async def test_user_and_password() -> None:
    with NatsServer(extra='authorization { user: "kvbus", password: "secret" }') as server:
        await works(CommonSettings(nats=server.url, nats_user="kvbus", nats_password="secret"))
        address = server.url.removeprefix("nats://")
        await works(CommonSettings(nats=f"nats://kvbus:secret@{address}"))
        await is_refused(CommonSettings(nats=server.url, nats_user="kvbus", nats_password="wrong"))
        await is_refused(CommonSettings(nats=server.url))


async def test_nkey(tmp_path: Path) -> None:
    pair = nkeys.from_seed(bytearray(SEED))
    seed_file = tmp_path / "seed.nk"
    seed_file.write_bytes(SEED + b"\n")
    users = f'authorization {{ users = [ {{ nkey: "{pair.public_key.decode()}" }} ] }}'
    with NatsServer(extra=users) as server:
        await works(CommonSettings(nats=server.url, nats_nkey_seed=str(seed_file)))
        await is_refused(CommonSettings(nats=server.url))


def jwt(issuer: Any, subject: str, claims: Mapping[str, object]) -> str:
    """A NATS JWT (ed25519-nkey), as `nsc` makes it."""
    import base64
    import hashlib

    def b64(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    body: dict[str, object] = {"iat": 1_700_000_000, "iss": issuer.public_key.decode(), "sub": subject, **claims}
    digest = hashlib.new("sha512_256", json.dumps(body, sort_keys=True).encode()).digest()
    body["jti"] = base64.b32encode(digest).rstrip(b"=").decode()
    head = b64(json.dumps({"typ": "JWT", "alg": "ed25519-nkey"}).encode())
    payload = b64(json.dumps(body, sort_keys=True).encode())
    signature = b64(issuer.sign(f"{head}.{payload}".encode()))
    return f"{head}.{payload}.{signature}"


def key_pair(prefix: int, fill: int) -> Any:
    """A key pair of a role (operator, account, user) from fixed bytes."""
    return nkeys.from_seed(bytearray(nkeys.encode_seed(bytes([fill]) * 32, prefix)))


async def test_credentials_file(tmp_path: Path) -> None:
    operator = key_pair(nkeys.PREFIX_BYTE_OPERATOR, 1)
    account = key_pair(nkeys.PREFIX_BYTE_ACCOUNT, 2)
    user = key_pair(nkeys.PREFIX_BYTE_USER, 3)
    limits = {"subs": -1, "conn": -1, "leaf": -1, "imports": -1, "exports": -1, "data": -1, "payload": -1}
    js_limits = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    account_claims = {"name": "A", "nats": {"limits": limits | js_limits, "type": "account", "version": 2}}
    user_claims = {"name": "U", "nats": {"subs": -1, "data": -1, "payload": -1, "type": "user", "version": 2}}
    operator_claims = {"name": "O", "nats": {"type": "operator", "version": 2}}
    account_id = account.public_key.decode()
    system = key_pair(nkeys.PREFIX_BYTE_ACCOUNT, 4).public_key.decode()
    system_claims = {"name": "SYS", "nats": {"limits": limits, "type": "account", "version": 2}}
    extra = (
        f"operator: {jwt(operator, operator.public_key.decode(), operator_claims)}\n"
        f"system_account: {system}\n"
        "resolver: MEMORY\n"
        "resolver_preload: {\n"
        f"  {account_id}: {jwt(operator, account_id, account_claims)}\n"
        f"  {system}: {jwt(operator, system, system_claims)}\n"
        "}\n"
    )
    creds = tmp_path / "user.creds"
    creds.write_text(
        "-----BEGIN NATS USER JWT-----\n"
        f"{jwt(account, user.public_key.decode(), user_claims)}\n"
        "------END NATS USER JWT------\n\n"
        "-----BEGIN USER NKEY SEED-----\n"
        f"{user.seed.decode()}\n"
        "------END USER NKEY SEED------\n"
    )
    with NatsServer(extra=extra) as server:
        await works(CommonSettings(nats=server.url, nats_creds=str(creds)))
        await is_refused(CommonSettings(nats=server.url))


def openssl(*arguments: str, cwd: Path) -> None:
    subprocess.run(["openssl", *arguments], cwd=cwd, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, server.pem, client.pem, stranger.pem, with keys."""
    folder = tmp_path_factory.mktemp("tls")
    (folder / "san.cnf").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30"]
    for ca in ("ca", "stranger"):
        extensions = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
        openssl(
            "req",
            "-x509",
            *curve,
            "-subj",
            f"/CN={ca}",
            *extensions,
            "-keyout",
            f"{ca}.key",
            "-out",
            f"{ca}.pem",
            cwd=folder,
        )
    for name in ("server", "client"):
        openssl(
            "req",
            "-new",
            *curve[:-2],
            "-subj",
            f"/CN={name}",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.csr",
            cwd=folder,
        )
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-days", "30", "-extfile", "san.cnf", "-out", f"{name}.pem", cwd=folder,
        )  # fmt: skip
    return folder


def tls_section(folder: Path, extra: str = "") -> str:
    return f'tls {{ cert_file: "{folder}/server.pem", key_file: "{folder}/server.key", ca_file: "{folder}/ca.pem" {extra} }}'


async def test_tls_with_a_certificate_authority(certificates: Path) -> None:
    with NatsServer(extra=tls_section(certificates), url_scheme="tls") as server:
        await works(CommonSettings(nats=server.url, nats_tls_ca=str(certificates / "ca.pem")))
        await is_refused(CommonSettings(nats=server.url, nats_tls_ca=str(certificates / "stranger.pem")))
        await is_refused(CommonSettings(nats=server.url))


async def test_tls_with_client_certificates(certificates: Path) -> None:
    ca, cert, key = (str(certificates / name) for name in ("ca.pem", "client.pem", "client.key"))
    with NatsServer(extra=tls_section(certificates, ", verify: true"), url_scheme="tls") as server:
        await works(CommonSettings(nats=server.url, nats_tls_ca=ca, nats_tls_cert=cert, nats_tls_key=key))
        await is_refused(CommonSettings(nats=server.url, nats_tls_ca=ca))


async def test_the_first_server_that_answers_is_taken(nats_server: NatsServer) -> None:
    await works(CommonSettings(nats=f"nats://127.0.0.1:1,{nats_server.url}"))


@pytest.mark.parametrize("setting", ["nats_creds", "nats_nkey_seed", "nats_tls_ca"])
def test_a_missing_file_is_bad_settings(setting: str) -> None:
    with pytest.raises(BadSettings):
        connect_options(CommonSettings(**{setting: "/nowhere/file"}))  # type: ignore[arg-type]


async def test_a_server_that_is_too_old_is_refused_with_its_version_and_the_reason() -> None:
    async def old_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = {"server_id": "x", "version": "2.9.10", "proto": 1, "max_payload": 1 << 20, "headers": True}
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    async with await asyncio.start_server(old_server, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        settings = CommonSettings(nats=f"nats://127.0.0.1:{port}")
        with pytest.raises(UnsupportedServer, match=r"2\.9 is too old: kvbus needs 2\.11") as refused:
            async with open_bus(settings, name="client", connect_timeout_s=WAIT_S):
                pass
    assert "time to live" in str(refused.value)


def test_without_the_nkeys_library_the_extra_is_named(tmp_path: Path) -> None:
    seed = tmp_path / "seed"
    seed.write_text("x")
    code = (
        "import sys; sys.modules['nkeys'] = None\n"
        "from kvbus_runtime.link import connect_options\n"
        "from kvbus_runtime.settings import BadSettings, CommonSettings\n"
        "try:\n"
        f"    connect_options(CommonSettings(nats_nkey_seed={str(seed)!r}))\n"
        "except BadSettings as problem:\n"
        "    print(problem)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "kvbus[nkeys]" in result.stdout
