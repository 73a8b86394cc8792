"""What instances tell the indexer, made from block numbers."""

from kvbus_testkit.instances import block_key, block_keys, worker_record
from kvbus_wire.kv_events import KvEvent, KvEvents, Stored
from kvbus_wire.load import LoadReport
from kvbus_wire.records import InstanceRecord, KvbmRecord, WorkerRecord
from kvbus_wire.router import Decision
from kvbus_wire.worker import BlockSnapshotChunk, SnapshotChain

MODEL = "tiny/model"


def stored(*numbers: int, parent: int | None = None) -> Stored:
    return Stored(b"" if parent is None else block_key(parent), block_keys(*numbers))


def batch(
    *events: KvEvent, seq: int, worker: str = "w1", incarnation: int = 1, model: str = MODEL, tier: str = "g1"
) -> KvEvents:
    return KvEvents(instance_id=worker, incarnation=incarnation, model=model, first_seq=seq, events=events, tier=tier)


def a_worker(worker: str = "w1", incarnation: int = 1, model: str = MODEL, **fields: object) -> InstanceRecord:
    """``fields``: of the `WorkerRecord`."""
    record: WorkerRecord = worker_record(model, **fields)  # type: ignore[arg-type]
    return _record("worker", worker, incarnation, worker=record)


def a_kvbm(instance_id: str = "k1", incarnation: int = 1) -> InstanceRecord:
    return _record("kvbm", instance_id, incarnation, kvbm=KvbmRecord(g2_bytes=1 << 20))


def _record(
    service: str,
    instance_id: str,
    incarnation: int,
    *,
    worker: WorkerRecord | None = None,
    kvbm: KvbmRecord | None = None,
) -> InstanceRecord:
    return InstanceRecord(
        service=service,
        instance_id=instance_id,
        incarnation=incarnation,
        host_id="h",
        version="1",
        started_ms=0,
        worker=worker,
        kvbm=kvbm,
    )


def load_report(kv_seq: int, worker: str = "w1", incarnation: int = 1, used_blocks: int = 0) -> LoadReport:
    return LoadReport(
        instance_id=worker,
        incarnation=incarnation,
        model=MODEL,
        running=0,
        waiting=0,
        waiting_tokens=0,
        used_blocks=used_blocks,
        total_blocks=100,
        kv_seq=kv_seq,
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.01,
    )


def chunk(
    kv_seq: int,
    *chains: SnapshotChain,
    worker: str = "w1",
    incarnation: int = 1,
    model: str = MODEL,
    tier: str = "g1",
    next_cursor: int | None = None,
) -> BlockSnapshotChunk:
    return BlockSnapshotChunk(
        snapshot_id="s",
        instance_id=worker,
        incarnation=incarnation,
        model=model,
        tier=tier,
        kv_seq=kv_seq,
        chains=chains,
        next_cursor=next_cursor,
    )


def chain(*numbers: int, parent: int | None = None) -> SnapshotChain:
    return SnapshotChain(parent=b"" if parent is None else block_key(parent), keys=block_keys(*numbers))


def decision(request_id: str, *numbers: int, worker: str = "w1", incarnation: int = 1, model: str = MODEL) -> Decision:
    """A request whose prompt is this chain of blocks was sent to the worker."""
    return Decision(
        router_id="r1",
        request_id=request_id,
        model=model,
        worker_id=worker,
        incarnation=incarnation,
        prompt_tokens=16 * len(numbers),
        uncached_tokens=0,
        expected_output=1,
        keys=block_keys(*numbers),
    )
