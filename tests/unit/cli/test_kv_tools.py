"""What `kvbus kv` makes of the answers."""

from typing import cast

import pytest

from kvbus_cli.asking import NotAnswered
from kvbus_cli.kv.asking import Chain, ChainSettings, Kvbm, of_model
from kvbus_cli.kv.evict import EvictSettings
from kvbus_cli.kv.inspect import standing
from kvbus_cli.kv.ls import MOST_BLOCKS, LsSettings
from kvbus_cli.kv.tables import block_lines, size, tiers_tables
from kvbus_cli.prompt.request_file import BadRequestFile
from kvbus_runtime.bus import Bus
from kvbus_wire.kv_tools import BlockState, DescribedTiers, DescribeTiers, TierHolding, TierState
from kvbus_wire.records import InstanceRecord, ModelCard, WorkerRecord

KEYS = [bytes([i]) * 16 for i in range(5)]


def state(tier: str, i: int, kind: str = "normal", ttl_s: float | None = None) -> BlockState:
    return BlockState(tier=tier, key=KEYS[i], parent=b"", depth=i, kind=kind, ttl_s=ttl_s)


def test_how_much_of_a_chain_a_tier_has_from_its_beginning_and_at_all() -> None:
    found = block_lines(
        "k1", [state("g3", 1), state("g2", 0), state("g2", 1, "pinned", 30.0), state("g2", 3, "pinned", 9.0)]
    )
    lines = standing(Chain("m", b"".join(KEYS)), found)
    assert [(line.tier, line.leading, line.blocks) for line in lines] == [("g2", 2, 3), ("g3", 0, 1)]
    assert lines[0].kinds == {"normal": 1, "pinned": 2}
    assert (lines[0].shortest_ttl_s, lines[1].shortest_ttl_s) == (9.0, None)


def test_nobody_has_any() -> None:
    assert standing(Chain("m", b"".join(KEYS)), []) == []


def test_a_chain_in_pieces() -> None:
    chain = Chain("m", b"".join(KEYS))
    assert chain.blocks == 5
    assert chain.pieces(2) == [KEYS[0] + KEYS[1], KEYS[2] + KEYS[3], KEYS[4]]


def test_blocks_by_their_keys() -> None:
    key = KEYS[3].hex()
    assert ChainSettings(model="m", keys=(key, key)).chain() == Chain("m", KEYS[3] * 2)
    for fields in ({"keys": (key,)}, {"model": "m", "keys": ("xyz",)}, {"model": "m", "keys": (key,), "text": "t"}):
        with pytest.raises(BadRequestFile):
            ChainSettings(**fields).chain()


def test_all_blocks_are_evicted_only_when_nothing_else_was_named() -> None:
    assert EvictSettings(model="m", all=True).chain() == Chain("m", b"")
    key = KEYS[3].hex()
    for fields in ({}, {"model": "m", "keys": (key,)}, {"model": "m", "text": "t"}, {"model": "m", "tokens": "1,2"}):
        with pytest.raises(BadRequestFile):
            EvictSettings(all=True, **fields).chain()


def test_sizes_are_told_in_the_unit_that_fits() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1 << 30, 5 << 50)] == ["0 B", "1023 B", "1.0 KiB", "1.0 GiB", "5120.0 TiB"]


def test_a_tier_that_is_bypassed_is_marked() -> None:
    tier = TierState(tier="g4", blocks=1, used_bytes=1, capacity_bytes=2, available=False, evictions={"normal": 3})
    (tiers, _), _ = tiers_tables([DescribedTiers(instance_id="k1", host_id="h", tiers=(tier,), g4_store="file:///s")])
    cells = [next(iter(column.cells)) for column in tiers.columns]
    assert cells[:3] == ["k1", "g4", "bypassed"]
    assert "3 normal" in cells


@pytest.mark.parametrize("limit", [0, MOST_BLOCKS + 1, 10**20])
def test_a_list_has_an_end(limit: int) -> None:
    with pytest.raises(ValueError, match="limit must be from 1 to 1,000,000"):
        LsSettings(limit=limit)


def test_a_key_that_is_none_is_named() -> None:
    with pytest.raises(BadRequestFile, match="'zz' is no key: one has 32 hexadecimal digits"):
        ChainSettings(model="m", keys=("ab" * 16, "zz")).chain()


class _OneKvbm:
    """A bus with one kvbm, which holds blocks of the model `old`."""

    class Subjects:
        def control(self, instance_id: str) -> str:
            return instance_id

    class Settings:
        namespace = "n"

    subjects, settings = Subjects(), Settings()

    async def request(self, subject: str, question: object, reply: object, *, timeout_s: float) -> DescribedTiers:
        assert isinstance(question, DescribeTiers)
        holding = TierHolding(model="old", kv_layout="", block_size=16, block_bytes=1, blocks=1)
        return DescribedTiers("k", "h", tiers=(TierState("g2", 1, 1, 1, holdings=(holding,)),))


async def test_a_model_that_nobody_knows_is_refused_with_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async def registered(bus: object, *services: str) -> list[InstanceRecord]:
        card = ModelCard(name="new", fingerprint="", block_size=16, context_length=1, bundle="", kv_layout="")
        worker = WorkerRecord(card, "mock", 1, 1, 1, 1.0, 1.0)
        both = {
            "kvbm": InstanceRecord("kvbm", "k", 1, "h", "", 1),
            "worker": InstanceRecord("worker", "w", 1, "h", "", 1, worker=worker),
        }
        return [both[service] for service in services]

    async def name_of(kvbm: Kvbm) -> str:
        return kvbm.instance_id

    monkeypatch.setattr("kvbus_cli.kv.asking.instances", registered)
    bus = cast("Bus", _OneKvbm())
    with pytest.raises(NotAnswered, match="no model 'nope' is known: there is new, old"):
        await of_model(bus, "", "nope", name_of)
    assert [await of_model(bus, "", known, name_of) for known in ("old", "new")] == [["k"], ["k"]]
