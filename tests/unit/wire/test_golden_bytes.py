"""Bytes on the bus are a contract between versions: they never change, and unknown fields are skipped."""

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvbus_wire
from kvbus_testkit.wire_samples import ERROR, SAMPLES, golden_file, tag_of, write_missing
from kvbus_wire.errors import ErrorReply
from kvbus_wire.frontend import StepFrame
from kvbus_wire.message import DecodeFailed, Decoder, Message, Part, encode
from kvbus_wire.worker import Accepted, Cancel, NeedTokens

GOLDEN = Path(__file__).parent / "golden"

for module in pkgutil.iter_modules(kvbus_wire.__path__):
    importlib.import_module(f"kvbus_wire.{module.name}")

ids = [tag_of(message) for message in SAMPLES]


def subclasses(cls: type) -> set[type]:
    children: set[type] = set(cls.__subclasses__())
    return children.union(*(subclasses(child) for child in children))


def messages() -> set[type]:
    return {cls for cls in subclasses(Message) if cls.__module__.startswith("kvbus_wire.")}


def golden(message: Message) -> bytes:
    return bytes.fromhex(golden_file(GOLDEN, message).read_text())


def test_every_message_has_a_sample_and_a_golden_file() -> None:
    assert {type(sample) for sample in SAMPLES} == messages()
    assert {file.name for file in GOLDEN.iterdir()} == {golden_file(GOLDEN, sample).name for sample in SAMPLES}


def test_no_two_messages_have_the_same_tag() -> None:
    tags = [str(cls.__struct_config__.tag) for cls in messages()]  # type: ignore[attr-defined]
    assert len(tags) == len(set(tags))


@pytest.mark.parametrize("sample", SAMPLES, ids=ids)
def test_samples_set_every_field_so_that_the_golden_bytes_cover_it(sample: Message) -> None:
    for field in msgspec.structs.fields(sample):
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        assert getattr(sample, field.name) != default


@pytest.mark.parametrize("sample", SAMPLES, ids=ids)
def test_messages_encode_to_their_golden_bytes(sample: Message) -> None:
    assert encode(sample) == golden(sample)


@pytest.mark.parametrize("sample", SAMPLES, ids=ids)
def test_golden_bytes_decode_to_the_message(sample: Message) -> None:
    assert Decoder.of(type(sample)).decode(golden(sample)) == sample


@pytest.mark.parametrize("sample", SAMPLES, ids=ids)
def test_messages_of_a_newer_version_with_unknown_fields_are_understood(sample: Message) -> None:
    newer = extended(msgspec.msgpack.decode(golden(sample)), sample)
    assert Decoder.of(type(sample)).decode(msgspec.msgpack.encode(newer)) == sample


def extended(plain: dict[str, Any], struct: msgspec.Struct) -> dict[str, Any]:
    """Put an unknown field into the message and into every part of it that is encoded by names."""
    result = {**plain, "field_of_a_newer_version": {"nested": [1, b"x"]}}
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        if isinstance(value, Part | Message) and field.name in result:
            result[field.name] = extended(result[field.name], value)
    return result


@pytest.mark.parametrize("sample", SAMPLES, ids=ids)
def test_array_like_parts_of_a_newer_version_with_more_elements_are_understood(sample: Message) -> None:
    plain = msgspec.msgpack.decode(golden(sample))
    for name in ("started", "deltas"):
        if name in plain:
            plain[name] = [[*item, *defaults(getattr(sample, name)[0], item), "more"] for item in plain[name]]
    assert Decoder.of(type(sample)).decode(msgspec.msgpack.encode(plain)) == sample


def defaults(struct: msgspec.Struct, encoded: list[Any]) -> list[Any]:
    return [getattr(struct, name) for name in struct.__struct_fields__[len(encoded) :]]


def test_a_frame_number_that_nobody_could_count_on_from_is_refused() -> None:
    frame = StepFrame(worker_id="w", incarnation=1, seq=2**64 - 1)
    with pytest.raises(DecodeFailed):
        Decoder.of(StepFrame).decode(encode(frame))


def test_defaults_are_not_sent() -> None:
    plain = msgspec.msgpack.decode(encode(ErrorReply(code=ERROR.code, message="m")))
    assert plain == {"type": "error", "code": "overloaded", "message": "m"}


def test_a_union_tells_its_messages_apart() -> None:
    decoder = Decoder.of(Accepted, NeedTokens)
    assert decoder.decode(encode(NeedTokens(request_id="r"))) == NeedTokens(request_id="r")
    assert decoder.decode(encode(Accepted(request_id="r", incarnation=1))) == Accepted(request_id="r", incarnation=1)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xff" * 40,
        encode(Cancel(request_id="r", reason="x")),
        msgspec.msgpack.encode({"type": "accepted", "request_id": 5, "incarnation": 1}),
        msgspec.msgpack.encode({"type": "accepted", "request_id": "r"}),
        msgspec.msgpack.encode([1, 2, 3]),
        b"\x81\xa4type\xa2\xff\xfe",
        b"\x82\xa4type\xa8accepted\xa1x" + b"\x91" * 100_000 + b"\xc0",
        encode(Accepted(request_id="r", incarnation=1))[:-3],
    ],
)
def test_bytes_that_are_no_such_message_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeFailed):
        Decoder.of(Accepted, NeedTokens).decode(data)


def test_golden_files_are_written_once_and_never_again(tmp_path: Path) -> None:
    write_missing(tmp_path)
    for sample in SAMPLES:
        assert golden_file(tmp_path, sample).read_bytes() == golden_file(GOLDEN, sample).read_bytes()
    golden_file(tmp_path, ERROR).write_text("kept")
    write_missing(tmp_path)
    assert golden_file(tmp_path, ERROR).read_text() == "kept"
