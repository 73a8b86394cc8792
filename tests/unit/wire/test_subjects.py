import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_wire.subjects import Subjects, escape, unescape

segments = st.text(min_size=1, max_size=40).filter(lambda text: text.encode("utf-8", "ignore").decode() == text)


@given(segments)
def test_any_text_becomes_one_subject_token_and_back(text: str) -> None:
    token = escape(text)
    assert re.fullmatch(r"[A-Za-z0-9_%-]+", token)
    assert unescape(token) == text


@given(segments, segments)
def test_different_texts_never_share_a_token(one: str, other: str) -> None:
    assert (escape(one) == escape(other)) == (one == other)


def test_an_empty_segment_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        escape("")
    with pytest.raises(ValueError, match="empty"):
        Subjects("default").load("")


def test_names_with_dots_slashes_wildcards_and_spaces_stay_in_their_segment() -> None:
    subjects = Subjects("default")
    assert subjects.route("org/model.v1") == "kvbus.v1.default.route.org%2Fmodel%2Ev1"
    assert subjects.generate("a b>c*d") == "kvbus.v1.default.worker.a%20b%3Ec%2Ad.generate"


def test_a_star_is_a_wildcard() -> None:
    assert Subjects("n").kv_events("*", "*") == "kvbus.v1.n.kv.*.*"


def test_namespaces_are_separate() -> None:
    assert Subjects("a.b").root != Subjects("a").root + ".b"
    assert Subjects("a.b").root.count(".") == 2


def test_the_subjects_are_as_documented() -> None:
    s = Subjects("n")
    assert [
        s.route("m"),
        s.progress("m"),
        s.decisions("m"),
        s.routers_control,
        s.router_control("r"),
        s.index_query("m"),
        s.indexer_query("i"),
        s.indexer_control("i"),
        s.generate("w"),
        s.control("w"),
        s.steps("f"),
        s.frontend_control("f"),
        s.response_events,
        s.kv_events("m", "w"),
        s.load("w"),
        s.kvbm("k"),
    ] == [
        "kvbus.v1.n.route.m",
        "kvbus.v1.n.router.m.progress",
        "kvbus.v1.n.router.m.decisions",
        "kvbus.v1.n.routers.control",
        "kvbus.v1.n.routers.r.control",
        "kvbus.v1.n.index.m.query",
        "kvbus.v1.n.indexers.i.query",
        "kvbus.v1.n.indexers.i.control",
        "kvbus.v1.n.worker.w.generate",
        "kvbus.v1.n.worker.w.control",
        "kvbus.v1.n.frontend.f.steps",
        "kvbus.v1.n.frontend.f.control",
        "kvbus.v1.n.responses",
        "kvbus.v1.n.kv.m.w",
        "kvbus.v1.n.load.w",
        "kvbus.v1.n.kvbm.k",
    ]


@given(segments)
def test_streams_and_buckets_have_names_that_the_server_takes(namespace: str) -> None:
    subjects = Subjects(namespace)
    for name in (subjects.kv_stream, subjects.instances_bucket, subjects.models_bucket, subjects.settings_bucket):
        assert re.fullmatch(r"[A-Za-z0-9_-]+", name)
