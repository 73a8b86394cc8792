"""Settings: one frozen struct per service, read once from flags, environment, file and defaults, in this order.

A setting is a struct field. Its name makes the flag (``--http-port``) and the variable: fields of `CommonSettings` read
``KVBUS_<FIELD>``, a service's own fields ``KVBUS_<SERVICE>_<FIELD>``. A variable ``KVBUS_*`` that nobody knows is an error.
"""

import argparse
import difflib
import json
import math
import os
import re
import sys
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvbus_runtime.arguments import ArgumentParser, complaint

SERVICES = ("frontend", "router", "indexer", "worker", "kvbm")
OTHER_PREFIXES = ("up", "cli", "chat", "bench", "events", "cache", "test", "replay")
"""Variables of other programs of this distribution, ignored by the services like those of other services."""

EXIT_BAD_CONFIG = 2
MASK = "********"

_NATS_SCHEMES = ("nats", "tls", "ws", "wss")
_URL_SECRET = re.compile(r"://[^@/,\s]*@")


class Flag(msgspec.Struct, frozen=True):
    """What ``--help`` says about a setting. ``secret``: never printed. ``choices``: the only values allowed.
    ``infinite``: "inf" has a meaning. ``also``: further spellings of the flag (``--dyn-...``), as other servers have it.
    """

    help: str
    secret: bool = False
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    infinite: bool = False
    also: tuple[str, ...] = ()


class CommonSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of every service. A subclass that validates in ``__post_init__`` calls the inherited one first."""

    nats: Annotated[str, Flag("addresses of the NATS servers, separated by commas", metavar="URLS")] = (
        "nats://127.0.0.1:4222"
    )
    nats_user: Annotated[str, Flag("user name for NATS")] = ""
    nats_password: Annotated[str, Flag("password for NATS", secret=True)] = ""
    nats_creds: Annotated[str, Flag("credentials file for NATS (JWT and seed)", metavar="FILE")] = ""
    nats_nkey_seed: Annotated[str, Flag("file with the NKey seed for NATS", metavar="FILE")] = ""
    nats_tls_ca: Annotated[str, Flag("certificate authority of the NATS servers; turns TLS on", metavar="FILE")] = ""
    nats_tls_cert: Annotated[str, Flag("client certificate for NATS", metavar="FILE")] = ""
    nats_tls_key: Annotated[str, Flag("key of the client certificate", metavar="FILE")] = ""
    namespace: Annotated[str, Flag("services see only others of the same namespace")] = "default"
    instance_id: Annotated[str, Flag("id of this instance, unique in the namespace (empty: generated)")] = ""
    host_id: Annotated[str, Flag("instances with the same one share memory (empty: the host name)")] = ""
    health_host: Annotated[str, Flag("address of /livez, /readyz and /metrics")] = "127.0.0.1"
    health_port: Annotated[int, Flag("port of /livez, /readyz and /metrics (0: any free one, -1: none)")] = 0
    log_level: Annotated[str, Flag("least severity logged", choices=("debug", "info", "warning", "error"))] = "info"
    log_format: Annotated[str, Flag("auto is console on a terminal", choices=("auto", "console", "json"))] = "auto"
    drain_timeout_s: Annotated[float, Flag("how long requests in flight may go on after SIGTERM")] = 30.0
    lease_ttl_s: Annotated[int, Flag("an instance that is silent this long counts as gone")] = 8
    kv_event_encoding: Annotated[str, Flag("form of the KV events on the bus", choices=("msgpack", "json"))] = "msgpack"
    kv_stream_max_bytes: Annotated[int, Flag("size limit of the stream of KV events (reserved on the bus)")] = 256 << 20
    kv_stream_max_age_s: Annotated[float, Flag("age limit of the stream of KV events")] = 86_400.0
    stream_replicas: Annotated[int, Flag("copies of streams and buckets in a NATS cluster")] = 1
    max_message_bytes: Annotated[int, Flag("limit of a message that is sent in parts")] = 64 << 20
    outage_buffer_bytes: Annotated[int, Flag("messages kept while the bus is away, to be sent after it")] = 4 << 20

    def __post_init__(self) -> None:
        _require(self.lease_ttl_s >= 2, "lease_ttl_s must be at least 2 (whole seconds)")
        _require(self.drain_timeout_s >= 0, "drain_timeout_s must not be negative")
        _require(bool(self.namespace), "namespace must not be empty")
        _require(bool(self.nats_urls), "nats names no server")
        for url in self.nats_urls:
            _check_nats_url(url)
        _require(-1 <= self.health_port <= 65535, "health_port must be -1 or 0..65535")
        _require(self.kv_stream_max_bytes > 0, "kv_stream_max_bytes must be positive")
        _require(self.kv_stream_max_age_s > 0, "kv_stream_max_age_s must be positive")
        _require(1 <= self.stream_replicas <= 5, "stream_replicas must be 1..5")
        _require(self.max_message_bytes > 0, "max_message_bytes must be positive")
        _require(self.outage_buffer_bytes >= 0, "outage_buffer_bytes must not be negative")
        _require(bool(self.nats_tls_cert) == bool(self.nats_tls_key), "nats_tls_cert and nats_tls_key go together")
        ways = [bool(self.nats_user), bool(self.nats_creds), bool(self.nats_nkey_seed)]
        _require(sum(ways) <= 1, "give only one of nats_user, nats_creds and nats_nkey_seed")
        for name, spec in specs_of(type(self)).items():
            value = getattr(self, name)
            if spec.flag.choices and value not in spec.flag.choices:
                raise ValueError(f"{name} must be one of {', '.join(filter(None, spec.flag.choices))}, not {value!r}")
            # Every limit is a comparison, and none of them holds or breaks for "nan".
            if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and not spec.flag.infinite)):
                raise ValueError(f"{name} must be a finite number")

    @property
    def nats_urls(self) -> list[str]:
        return [url.strip() for url in self.nats.split(",") if url.strip()]

    @property
    def nats_shown(self) -> str:
        """The same for people and logs: without users and passwords."""
        return _without_secrets(self.nats)


S = TypeVar("S", bound=CommonSettings)
CHECK = "check-config"


class BadSettings(Exception):
    """Settings that cannot be used; the text is for the person who wrote them."""


class Spec(msgspec.Struct, frozen=True):
    """One setting: its annotated type and where it is read from."""

    name: str
    type: Any
    default: Any
    flag: Flag
    own: bool

    @property
    def option(self) -> str:
        """A field named like a keyword of Python ends in an underscore, which the flag drops."""
        return "--" + self.name.rstrip("_").replace("_", "-")

    def variable(self, service: str) -> str:
        name = self.name.rstrip("_")
        return f"KVBUS_{service}_{name}".upper() if self.own else f"KVBUS_{name}".upper()


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _without_secrets(text: str) -> str:
    return _URL_SECRET.sub(f"://{MASK}@", text)


def _check_nats_url(url: str) -> None:
    """The parts that nats-py trips over. Raise ValueError."""
    shown = _without_secrets(url)
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        usable = parts.scheme in _NATS_SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError as problem:
        raise ValueError(f"nats: {shown!r}: {problem}") from None
    _require(usable, f"nats: {shown!r} is no address of a NATS server (nats://HOST:PORT)")


_specs: dict[type, dict[str, Spec]] = {}


def specs_of(cls: type[CommonSettings]) -> dict[str, Spec]:
    """All settings of a struct, common ones first."""
    if cls not in _specs:
        common = set(CommonSettings.__struct_fields__)
        hints = typing.get_type_hints(cls, include_extras=True)
        fields = {field.name: field for field in msgspec.structs.fields(cls)}
        found = {}
        for name in cls.__struct_fields__:
            hint = hints[name]
            metadata = getattr(hint, "__metadata__", ())
            flag = next((item for item in metadata if isinstance(item, Flag)), Flag(""))
            plain = hint.__origin__ if metadata else hint
            field = fields[name]
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            found[name] = Spec(name, plain, default, flag, name not in common)
        _specs[cls] = found
    return _specs[cls]


def parse_settings(
    cls: type[S],
    *,
    service: str,
    description: str,
    prog: str = "",
    argv: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> S:
    """Read the settings of ``service``, for the command ``prog`` (empty: the service's own).

    Exit with status 2 and a message on bad ones; ``check-config`` prints and exits with 0.
    """
    specs = specs_of(cls)
    environ = os.environ if env is None else env
    parser = _parser(specs, service, description, prog or f"kvbus {service}")
    _refuse_unknown_options(parser.prog, sys.argv[1:] if argv is None else argv, specs.values())
    given = vars(parser.parse_args(argv))
    verb = given.pop("verb")
    if verb not in (None, CHECK):
        _fail(parser.prog, f"unexpected argument {verb!r}: besides options there is only {CHECK}")
    try:
        config_file = given.pop("config", None) or environ.get("KVBUS_CONFIG", "")
        values = _from_file(Path(config_file), specs, service) if config_file else {}
        values |= _from_environment(environ, specs, service)
        values |= {name: _from_text(specs[name], raw, specs[name].option) for name, raw in given.items()}
        settings = _build(cls, values)
    except BadSettings as problem:
        _fail(parser.prog, str(problem))
    if verb == CHECK:
        sys.stdout.write(render(settings, service))
        raise SystemExit(0)
    return settings


def _refuse_unknown_options(prog: str, argv: Sequence[str], specs: Iterable[Spec]) -> None:
    """Before argparse looks: it takes the value behind a misspelt flag for a verb, and complains of that."""
    known = {"--help", "--config"}
    for spec in specs:
        known.update((spec.option, *spec.flag.also))
        if spec.type is bool:
            known.update("--no-" + option.removeprefix("--") for option in (spec.option, *spec.flag.also))
    for word in argv:
        option = word.partition("=")[0]
        if option.startswith("--") and option not in known:
            close = difflib.get_close_matches(option, known, n=1)
            _fail(prog, f"unknown option {option}" + (f" (did you mean {close[0]}?)" if close else ""))


def _fail(prog: str, message: str) -> NoReturn:
    sys.stderr.write(complaint(prog, message))
    raise SystemExit(EXIT_BAD_CONFIG)


def _parser(specs: Mapping[str, Spec], service: str, description: str, prog: str) -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog=prog,
        description=description,
        epilog="Precedence: flags, environment, configuration file, defaults. Exit status 2: bad configuration.",
        allow_abbrev=False,
    )
    parser.add_argument("verb", nargs="?", metavar=CHECK, help=f"{CHECK} prints the effective settings and exits")
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS, help="TOML file with settings (env KVBUS_CONFIG)"
    )
    own = parser.add_argument_group(f"{service} settings")
    common = parser.add_argument_group("settings of every service")
    for spec in specs.values():
        shown = MASK if spec.flag.secret and spec.default else _shown(spec.default)
        text = f"{spec.flag.help} (default: {shown}; env {spec.variable(service)})".lstrip()
        if spec.flag.choices:
            text = f"one of {', '.join(filter(None, spec.flag.choices))}; {text}"
        group = own if spec.own else common
        options: dict[str, Any] = {"dest": spec.name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        if spec.type is bool:
            group.add_argument(spec.option, *spec.flag.also, action=argparse.BooleanOptionalAction, **options)
        else:
            metavar = spec.flag.metavar or _metavar(spec.type)
            group.add_argument(spec.option, *spec.flag.also, metavar=metavar, **options)
    return parser


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None or value == "" or value is msgspec.NODEFAULT else str(value)


def _metavar(kind: Any) -> str:
    if _is_tuple(kind):
        return "A,B,.."
    return {int: "N", float: "X"}.get(_without_none(kind), "TEXT")


def _is_tuple(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        rest = [part for part in typing.get_args(kind) if part is not type(None)]
        return rest[0] if len(rest) == 1 else kind
    return kind


_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


_LARGEST = 2**63 - 1
"""What files, messages and the system take as a number."""


def _from_text(spec: Spec, raw: Any, source: str) -> Any:
    """The value of a flag or variable. Raise BadSettings naming ``source``."""
    if not isinstance(raw, str):
        return raw
    kind = _without_none(spec.type)
    value: Any = raw
    if kind is not spec.type and raw == "":
        return None
    if kind is bool:
        value = _BOOLEANS.get(raw.lower(), raw)
    elif _is_tuple(kind):
        value = [part.strip() for part in raw.split(",") if part.strip()]
    try:
        converted = msgspec.convert(value, kind, strict=kind is bool)
    except msgspec.ValidationError as problem:
        shown = MASK if spec.flag.secret else repr(raw)
        raise BadSettings(f"{source}: {shown}: {problem}") from None
    if isinstance(converted, int) and abs(converted) > _LARGEST:
        raise BadSettings(f"{source}: {raw}: at most {_LARGEST}")
    return converted


def _from_environment(env: Mapping[str, str], specs: Mapping[str, Spec], service: str) -> dict[str, Any]:
    known = {spec.variable(service): spec for spec in specs.values()}
    foreign = tuple(f"KVBUS_{name.upper()}_" for name in (*SERVICES, *OTHER_PREFIXES) if name != service)
    values = {}
    for variable, raw in env.items():
        if not variable.startswith("KVBUS_") or variable == "KVBUS_CONFIG":
            continue
        if variable in known:
            values[known[variable].name] = _from_text(known[variable], raw, variable)
        elif not variable.startswith(foreign):
            close = difflib.get_close_matches(variable, known, n=1)
            raise BadSettings(
                f"unknown environment variable {variable}" + (f" (did you mean {close[0]}?)" if close else "")
            )
    return values


def _from_file(path: Path, specs: Mapping[str, Spec], service: str) -> dict[str, Any]:
    """Common settings stand at the top, a service's own ones in its table; tables of other services are skipped."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise BadSettings(f"cannot read the configuration file {path}: {problem}") from None
    values: dict[str, Any] = {}
    own_table = content.pop(service, {})
    if not isinstance(own_table, dict):
        raise BadSettings(f"{path}: {service!r} must be a table: [{service}]")
    for name, value in content.items():
        if name in SERVICES and isinstance(value, dict):
            continue
        if name not in specs or specs[name].own:
            raise BadSettings(f"{path}: unknown setting {name!r} at the top level")
        values[name] = value
    for name, value in own_table.items():
        if name not in specs:
            raise BadSettings(f"{path}: unknown setting {name!r} in [{service}]")
        values[name] = value
    for name, value in values.items():
        try:
            values[name] = msgspec.convert(value, specs[name].type)
        except msgspec.ValidationError as problem:
            raise BadSettings(f"{path}: {name}: {problem}") from None
    return values


def _build(cls: type[S], values: Mapping[str, Any]) -> S:
    try:
        return cls(**values)
    except (ValueError, TypeError) as problem:
        raise BadSettings(str(problem)) from None


def effective(settings: CommonSettings) -> dict[str, Any]:
    """All settings with secrets masked, for the log and for ``check-config``."""
    shown: dict[str, Any] = {}
    for name, spec in specs_of(type(settings)).items():
        value = getattr(settings, name)
        if spec.flag.secret and value:
            value = MASK
        elif isinstance(value, str):
            value = _without_secrets(value)
        shown[name] = value
    return shown


def render(settings: CommonSettings, service: str) -> str:
    """The effective settings as a TOML file."""
    specs = specs_of(type(settings))
    shown = effective(settings)
    lines = [_toml_line(name, shown[name]) for name, spec in specs.items() if not spec.own]
    lines += ["", f"[{service}]"]
    lines += [_toml_line(name, shown[name]) for name, spec in specs.items() if spec.own]
    return "\n".join(lines) + "\n"


def _toml_line(name: str, value: Any) -> str:
    if value is None:
        return f"# {name} is not set"
    return f"{name} = {json.dumps(list(value) if isinstance(value, tuple) else value)}"
