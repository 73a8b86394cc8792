"""What sessions hold, what comes free when one ends, and that neither their number nor their size has no bound."""

import time
from typing import Any

import pytest

from kvbus_blocks.keys import KEY_BYTES, chain_keys
from kvbus_frontend.core.prompt import Prompt
from kvbus_frontend.core.sessions import ENTRY_BYTES, Freed, Served, Sessions, Visit
from kvbus_wire.frontend import SessionScope
from kvbus_wire.packing import pack_tokens
from kvbus_wire.request import SessionRef

DOMAIN = b"d" * 32
ACME, OTHER = SessionScope(salt="acme"), SessionScope(salt="other")


def prompt(tokens: str) -> Prompt:
    """One token per block."""
    packed = pack_tokens(list(tokens.encode()))
    return Prompt(packed, b"".join(chain_keys(DOMAIN, packed, 1)), DOMAIN, 1)


class Table:
    def __init__(self, limit: int = 100, limit_bytes: int = 1 << 20) -> None:
        self.sessions = Sessions(limit=limit, limit_bytes=limit_bytes)
        self.now = 1000.0

    def begin(
        self,
        name: str,
        tokens: str,
        *,
        scope: SessionScope = ACME,
        question: int = 0,
        asks: bool = False,
        **ref: Any,
    ) -> tuple[Visit, list[Freed]]:
        self.now += 1
        known = SessionRef(id=name, **ref)
        return self.sessions.begin(scope, known, "m", prompt(tokens), self.now, question=question, asks=asks)

    def end(self, visit: Visit, output: str = "", *, closed: bool = False) -> list[Freed]:
        self.now += 1
        longer = visit.prompt.extended(list(output.encode()))
        freed = self.sessions.end(visit, Served(prompts=[longer], output_tokens=len(output), closed=closed), self.now)
        self.sessions.check_integrity()
        return freed

    def run(self, name: str, tokens: str, output: str = "", *, scope: SessionScope = ACME, **ref: Any) -> list[Freed]:
        visit, freed = self.begin(name, tokens, scope=scope, **ref)
        return [*freed, *self.end(visit, output)]


def blocks(freed: list[Freed]) -> set[bytes]:
    return {part.unneeded[at : at + KEY_BYTES] for part in freed for at in range(0, len(part.unneeded), KEY_BYTES)}


def keys(tokens: str, start: int = 0) -> set[bytes]:
    packed = prompt(tokens).keys
    return {packed[at : at + KEY_BYTES] for at in range(start * KEY_BYTES, len(packed), KEY_BYTES)}


def test_what_no_other_session_has_comes_free() -> None:
    table = Table()
    table.run("a", "system one", " said")
    table.run("b", "system two")
    freed = table.sessions.forget(ACME, "a")
    assert blocks(freed) == keys("system one said", len("system "))
    assert blocks(table.sessions.forget(ACME, "b")) == keys("system two")
    assert table.sessions.forget(ACME, "b") == []
    assert table.sessions.size_bytes == 0


def test_a_longer_chain_takes_the_place_of_its_beginning_and_questions_on_the_side_are_chains_of_their_own() -> None:
    table = Table()
    table.run("a", "one", " two")
    table.run("a", "one two three", " four")
    table.run("a", "title?", " yes")
    session = table.sessions.find(ACME, "a")
    assert session is not None
    assert len(session.chains) == 2
    assert blocks(table.sessions.forget(ACME, "a")) == keys("one two three four") | keys("title? yes")


def test_a_session_that_is_deleted_while_it_runs_does_not_come_back() -> None:
    table = Table()
    table.run("a", "one", " two")
    visit, _ = table.begin("a", "one two three")
    freed = table.sessions.forget(ACME, "a")
    assert freed == [], "what runs needs all of it"
    assert blocks(table.end(visit, " four")) == keys("one two three four")
    assert table.sessions.find(ACME, "a") is None
    assert table.sessions.size_bytes == 0


def test_a_session_that_had_to_make_room_while_it_ran_frees_nothing() -> None:
    table = Table(limit=1)
    visit, _ = table.begin("a", "one")
    table.run("b", "two")
    assert table.end(visit, " more") == []
    assert [session.id for session in table.sessions.of(ACME)] == ["b"]


def test_tenants_do_not_see_each_other() -> None:
    table = Table()
    table.run("a", "one")
    table.run("a", "two", scope=OTHER)
    assert table.sessions.find(SessionScope(client="key-1", salt="acme"), "a") is None
    assert blocks(table.sessions.forget(OTHER, "a")) == keys("two")
    assert [session.id for session in table.sessions.of(ACME)] == ["a"]


def test_the_final_request_ends_a_session_and_an_ephemeral_one_lets_go_of_its_blocks() -> None:
    table = Table()
    table.run("lead", "system")
    assert blocks(table.run("sub", "system task", " done", ephemeral=True, final=True)) == keys("system task done", 6)
    assert table.run("lead", "system on", final=True) == []
    assert len(table.sessions) == 0


def test_a_final_request_beside_others_ends_the_session_when_all_have_ended() -> None:
    table = Table()
    first, _ = table.begin("sub", "one", ephemeral=True)
    last, _ = table.begin("sub", "two", ephemeral=True, final=True)
    assert table.end(last) == []
    assert blocks(table.end(first)) == keys("one") | keys("two")


def test_ephemeral_sub_agents_are_known_by_their_parent_however_deep() -> None:
    table = Table()
    table.run("sub", "one", parent="lead", ephemeral=True)
    table.run("subsub", "two", parent="sub", ephemeral=True)
    table.run("other", "three", parent="lead")
    table.run("lead", "four", parent="subsub")
    assert table.sessions.ephemeral_children(ACME, "lead") == ["sub", "subsub"]
    table.sessions.forget(ACME, "sub")
    assert table.sessions.ephemeral_children(ACME, "lead") == []


def test_thoughts_that_the_next_question_leaves_out_come_free() -> None:
    table = Table()
    visit, _ = table.begin("a", "system question<think", question=len("system question"), asks=True)
    table.end(visit, "ing> answer", closed=True)
    visit, freed = table.begin(
        "a", "system question answer next", asks=True, question=len("system question answer next")
    )
    common = len("system question")
    assert blocks(freed) == keys("system question<thinking> answer", common)
    table.end(visit)


@pytest.mark.parametrize(
    ("closed", "asks", "then"),
    [
        (False, True, "system question next"),
        (True, False, "system question next"),
        (True, True, "another thing altogether"),
        (True, True, "system question<think> more"),
    ],
)
def test_nothing_comes_free_while_a_loop_is_open_or_for_a_question_on_the_side(
    closed: bool, asks: bool, then: str
) -> None:
    table = Table()
    visit, _ = table.begin("a", "system question<think>", question=len("system question"), asks=True)
    table.end(visit, "", closed=closed)
    _, freed = table.begin("a", then, asks=asks)
    assert freed == []


def test_the_table_is_bounded_in_number_and_in_bytes_and_the_least_recently_used_go() -> None:
    table = Table(limit=3)
    for name in "abcd":
        table.run(name, name)
    table.run("b", "b")
    table.run("e", "e")
    assert [session.id for session in table.sessions.of(ACME)] == ["e", "b", "d"]
    assert table.sessions.forgotten == 2
    table = Table(limit_bytes=3 * ENTRY_BYTES)
    for name in "abcd":
        table.run(name, name * 50)
    assert len(table.sessions) == 1
    assert table.sessions.size_bytes <= 3 * ENTRY_BYTES


def test_ten_thousand_sub_agents_end_in_no_time() -> None:
    sessions, task = Sessions(limit=20_000, limit_bytes=1 << 30), prompt("s" * 1000)
    table = Table()
    table.sessions = sessions
    for i in range(10_000):
        ref = SessionRef(id=str(i), parent="lead", ephemeral=True)
        visit, _ = sessions.begin(ACME, ref, "m", task, 1.0)
        sessions.end(visit, Served(prompts=[task.extended([1000 + i, 1])]), 2.0)
    started = time.process_time()
    for name in table.sessions.ephemeral_children(ACME, "lead"):
        table.sessions.forget(ACME, name)
    assert time.process_time() - started < 5.0
    assert len(table.sessions) == 0
