"""`kvbus index` and `kvbus doctor`, without a bus."""

import msgspec
import pytest

from kvbus_cli.__main__ import main
from kvbus_cli.asking import Reply
from kvbus_cli.doctor.checks import EventStream, Facts, Finding, Level, findings
from kvbus_cli.index.digest import compared
from kvbus_cli.index.query import holdings
from kvbus_cli.index.top import together
from kvbus_cli.prompt.keys import KeyedPrompt
from kvbus_cli.tool import BAD_USAGE
from kvbus_testkit.index_events import a_kvbm, a_worker
from kvbus_wire.indexer import (
    FeedDigest,
    IndexDescription,
    IndexDigest,
    IndexUse,
    Match,
    ModelUse,
    SilentWorker,
    UsedPrefix,
)
from kvbus_wire.packing import short_key
from kvbus_wire.records import InstanceRecord


def test_the_deepest_holder_comes_first_and_blocks_become_tokens() -> None:
    prompt = KeyedPrompt(model="m", tokens=50, block_size=16, keys=bytes(48), context_length=99)
    told = holdings(
        prompt,
        [
            Match(instance_id="w2", tier="g1", depth=1),
            Match(instance_id="w1", tier="g1", depth=3, predicted=True),
            Match(instance_id="k1", tier="g2", depth=2),
        ],
    )
    assert [(h.instance_id, h.blocks, h.tokens, h.predicted) for h in told.holdings] == [
        ("w1", 3, 48, True),
        ("k1", 2, 32, False),
        ("w2", 1, 16, False),
    ]
    assert (told.blocks, told.tokens) == (3, 50)


def use(indexer: str, found: int, stored: int, *prefixes: tuple[int, int, float, int]) -> IndexUse:
    model = ModelUse(model="m", asked=100, found=found, stored=stored, removed=0, blocks=5, entries=10)
    used = tuple(UsedPrefix(model="m", key=k, depth=d, reads=r, owners=o) for k, d, r, o in prefixes)
    return IndexUse(indexer_id=indexer, models=(model,), prefixes=used)


def test_reads_of_replicas_add_up_and_writes_do_not() -> None:
    told = together([use("i1", 80, 10, (1, 4, 5.0, 2), (2, 8, 3.0, 1)), use("i2", 10, 12, (1, 4, 7.0, 1))], 1)
    assert told.indexers == ["i1", "i2"]
    assert (told.models[0].asked, told.models[0].found, told.models[0].stored) == (200, 90, 12)
    assert [(p.key, p.reads, p.owners) for p in told.prefixes] == [("0100000000000000", 12.0, 2)]


def test_a_prefix_is_named_as_events_and_rendered_prompts_name_its_last_block() -> None:
    key = bytes.fromhex("2ffa08fb6bbba1e300112233445566ff")
    told = together([use("i1", 1, 1, (short_key(key), 4, 1.0, 1))], 5)
    assert key.hex().startswith(told.prefixes[0].key)


@pytest.mark.parametrize("limit", ["0", "-3"])
def test_a_limit_that_shows_nothing_is_bad_usage(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["index", "top", "--limit", limit])
    assert ended.value.code == BAD_USAGE
    assert "limit must be at least 1" in capsys.readouterr().err


def digest(indexer: str, entries: int, digest: str = "same") -> IndexDigest:
    feed = FeedDigest(instance_id="w1", incarnation=1, model="m", tier="g1", kv_seq=3, entries=entries, key_sum=9)
    return IndexDigest(indexer_id=indexer, position=1, entries=entries, digest=digest, feeds=(feed,))


def test_digests_are_equal_only_when_all_answer_the_same() -> None:
    one = Reply("i1", digest("i1", 3))
    assert compared([one, Reply("i2", digest("i2", 3))]).equal
    different = compared([one, Reply("i2", digest("i2", 4, "other"))])
    assert (different.equal, different.differing) == (False, ["m w1 g1"])
    assert not compared([one, Reply("i2", problem="unavailable")]).equal


STREAM = EventStream(created="now", first_seq=1, last_seq=10)
INDEX = IndexDescription(
    indexer_id="i1", caught_up=True, stream="now", position=10, entries=5, blocks=4, instances=2, in_repair=0, partial=0
)


def plain_record(service: str, version: str = "1") -> InstanceRecord:
    return InstanceRecord(
        service=service, instance_id=f"{service}-1", incarnation=1, host_id="h", version=version, started_ms=0
    )


def look(*more: InstanceRecord, **index: object) -> tuple[list[Finding], list[Finding]]:
    """All findings for a system of one of each, and those that are not fine."""
    records = [plain_record("frontend"), plain_record("router"), plain_record("indexer"), a_worker(), a_kvbm(), *more]
    description = msgspec.structs.replace(INDEX, **index)
    told = findings(Facts(server="s", instances=records, stream=STREAM, indexers=[Reply("i1", description)]))
    return told, [finding for finding in told if finding.level is not Level.OK]


def test_a_system_in_order_has_nothing_but_good_findings() -> None:
    told, bad = look()
    assert bad == []
    assert {finding.about for finding in told} >= {"bus", "worker", "versions", "events", "i1", "event sources"}


@pytest.mark.parametrize(
    ("index", "level", "text"),
    [
        ({"position": 7}, Level.WARNING, "3 messages behind"),
        ({"stream": "former"}, Level.PROBLEM, "not there any more"),
        ({"caught_up": False}, Level.WARNING, "still reading"),
        ({"partial": 2}, Level.WARNING, "is full: 2"),
        ({"in_repair": 1}, Level.NOTE, "being repaired"),
        ({"silent": (SilentWorker(instance_id="w1", why="silent"),)}, Level.WARNING, "emits no KV events"),
        ({"silent": (SilentWorker(instance_id="w1", why="unheard"),)}, Level.WARNING, "none arrive"),
        ({"silent": (SilentWorker(instance_id="w1", why="declared"),)}, Level.NOTE, "guessed"),
    ],
)
def test_what_is_wrong_with_an_indexer_or_a_source_is_said(index: dict[str, object], level: Level, text: str) -> None:
    _, bad = look(**index)
    assert [finding.level for finding in bad] == [level]
    assert text in bad[0].text


def test_versions_and_models_that_do_not_fit_together_are_said() -> None:
    worker = a_worker("w2")
    assert worker.worker is not None
    card = msgspec.structs.replace(worker.worker.model, block_size=32)
    other = msgspec.structs.replace(worker, version="2", worker=msgspec.structs.replace(worker.worker, model=card))
    _, bad = look(other)
    assert [(finding.level, finding.about) for finding in bad] == [
        (Level.WARNING, "versions"),
        (Level.WARNING, "model"),
    ]


def test_what_is_missing_is_said_by_how_much_it_matters() -> None:
    told = findings(Facts(server="s", instances=[], stream=None, indexers=[]))
    levels = {finding.about: finding.level for finding in told}
    assert levels == {
        "bus": Level.OK,
        "frontend": Level.PROBLEM,
        "router": Level.PROBLEM,
        "worker": Level.PROBLEM,
        "indexer": Level.WARNING,
        "kvbm": Level.NOTE,
        "events": Level.WARNING,
    }


def test_an_indexer_that_does_not_answer_is_a_problem() -> None:
    told = findings(Facts(server="s", instances=[], stream=STREAM, indexers=[Reply("i1", problem="deadline")]))
    assert Finding(Level.PROBLEM, "i1", "does not answer: deadline") in told


@pytest.mark.parametrize("arguments", [[], ["--text", "a"], ["--text", "a", "--tokens", "1", "--model", "m"]])
def test_a_query_needs_one_prompt_and_a_model(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", "query", *arguments]) == BAD_USAGE
    assert "kvbus index query: give" in capsys.readouterr().err
