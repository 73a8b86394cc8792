"""Objects and logs of G4, their names, and the settings that say where they lie."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_blocks.retention import KINDS, MAX_PRIORITY, Directive
from kvbus_kvbm.core.cluster_limits import Removals, check_store_url
from kvbus_kvbm.core.cluster_log import BadLog, Kept, LogPart, SpecRecords, decode_log, encode_log, log_name
from kvbus_kvbm.core.cluster_objects import (
    HEADER_BYTES,
    BadObject,
    check_object,
    decode_header,
    encode_header,
    layout_tag,
    object_name,
    tenant_tag,
)
from kvbus_kvbm.core.lower import BlockMeta
from kvbus_kvbm.core.spec import PoolSpec
from kvbus_kvbm.settings import KvbmSettings
from kvbus_transfer import checksum

SPEC = PoolSpec("m", "layout", 100, 16)
LAYOUT = layout_tag(SPEC)
BODY = bytes(range(100))

directives = st.builds(
    Directive,
    kind=st.sampled_from(KINDS),
    priority=st.integers(-MAX_PRIORITY, MAX_PRIORITY),
    expires_s=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    tenant=st.text(max_size=16),
)
keys = st.binary(min_size=16, max_size=16)
metas = st.builds(
    BlockMeta,
    key=keys,
    parent=keys | st.just(b""),
    depth=st.integers(0, 2**32 - 1),
    checksum=st.just(checksum(BODY)),
    directive=directives,
)


@given(metas)
def test_an_object_says_what_was_written(meta: BlockMeta) -> None:
    data = memoryview(encode_header(meta, LAYOUT, len(BODY)) + BODY)
    assert check_object(data, meta.key, LAYOUT, len(BODY)) == meta


@given(metas, st.integers(0, 8 * (HEADER_BYTES + len(BODY)) - 1))
def test_no_flipped_bit_passes(meta: BlockMeta, bit: int) -> None:
    data = bytearray(encode_header(meta, LAYOUT, len(BODY)) + BODY)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadObject):
        check_object(memoryview(data), meta.key, LAYOUT, len(BODY))


@given(st.binary(max_size=600))
def test_whatever_lies_there_is_judged_and_nothing_else_happens(data: bytes) -> None:
    with pytest.raises(BadObject):
        check_object(memoryview(data), bytes(16), LAYOUT, 100)
    with pytest.raises(BadObject):
        decode_header(data[:HEADER_BYTES])
    with pytest.raises(BadLog):
        decode_log(data)


def test_a_long_name_of_a_tenant_is_shortened_to_one_of_its_own() -> None:
    long = "t" * 65
    assert len({tenant_tag(long), tenant_tag(long + "t"), tenant_tag("t" * 64)}) == 3
    meta = BlockMeta(bytes(16), b"", 0, checksum(BODY), Directive(tenant=long))
    stored, _ = decode_header(encode_header(meta, LAYOUT, 100))
    assert stored.meta.directive.tenant == tenant_tag(long)


def test_layouts_that_differ_in_anything_have_other_names() -> None:
    specs = [SPEC, PoolSpec("m", "other", 100, 16), PoolSpec("m", "layout", 101, 16), PoolSpec("m", "layout", 100, 32)]
    assert len({object_name(layout_tag(spec), bytes(16)) for spec in specs}) == 4
    assert layout_tag(PoolSpec("other name", "layout", 100, 16)) == LAYOUT


@given(st.lists(metas, max_size=5), st.booleans())
def test_a_log_says_what_was_written_and_no_cut_of_it_passes(blocks: list[BlockMeta], whole: bool) -> None:
    kept = [Kept(b.key, b.parent, b.depth, b.checksum, True, b.directive) for b in blocks]
    part = LogPart(whole, [SpecRecords(SPEC, kept, [bytes(16)])])
    data = encode_log(part)
    assert decode_log(data) == part
    for cut in range(0, len(data), 7):
        with pytest.raises(BadLog):
            decode_log(data[:cut])


def test_logs_are_named_in_the_order_of_writing_whatever_the_owner_is_called() -> None:
    names = [log_name("../a b", life, number) for life in (1, 15, 16, 1 << 41) for number in (1, 9, 10, 255)]
    assert names == sorted(names)
    assert all(part.replace("-", "").isalnum() for name in names for part in name.split("/"))


def test_removals_are_tried_in_turns_and_given_up_in_the_end() -> None:
    removals = Removals(attempts=2)
    removals.add(["a", "b"])
    assert removals.due(1) == ["a"]
    assert removals.failed(["a"]) == []
    assert removals.due(9) == ["b", "a"]
    removals.done(["b"])
    removals.add(["a"])
    assert removals.failed(["a"]) == ["a"]
    assert len(removals) == 0


@pytest.mark.parametrize("url", ["file:///a", "file:///a/b%20c", "s3://bucket", "s3://bucket/p/q"])
def test_stores_that_can_be_named(url: str) -> None:
    check_store_url(url)
    assert KvbmSettings(g4_url=url).g4_url == url


@pytest.mark.parametrize(
    "url", ["/a", "file://host/a", "file:///", "http://x/y", "s3://", "s3://user:password@bucket", "s3://bucket:80/x"]
)
def test_what_names_no_store_is_refused_without_telling_what_could_be_secret(url: str) -> None:
    with pytest.raises(ValueError, match=r"^g4_url: ") as refused:
        KvbmSettings(g4_url=url)
    assert "password" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("g4_bytes", 0),
        ("g4_read_deadline_s", 0.0),
        ("g4_parallel", -1),
        ("g4_pin_share", 1.5),
        ("tool_blocks", 0),
        ("tool_verify_bytes", 0),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        KvbmSettings(**{name: value})  # type: ignore[arg-type]


def test_a_lease_for_good_is_one() -> None:
    meta = BlockMeta(bytes(16), b"", 0, 1, Directive("pinned", expires_s=None))
    stored, _ = decode_header(encode_header(meta, LAYOUT, 100))
    assert stored.meta.directive.expires_s is None
    late = BlockMeta(bytes(16), b"", 0, 1, Directive("pinned", expires_s=math.inf))
    stored, _ = decode_header(encode_header(late, LAYOUT, 100))
    assert stored.meta.directive.expires_s is None
