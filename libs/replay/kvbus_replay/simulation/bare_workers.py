"""Records and reports of workers that there are not."""

from collections.abc import Sequence

from kvbus_wire.load import LoadReport
from kvbus_wire.records import InstanceRecord, ModelCard, WorkerRecord

MODEL = "bench"
TOKENS_PER_S = 10_000.0
STEP_S = 0.02
SLOTS = 64
CARD = ModelCard(name=MODEL, fingerprint="f", block_size=16, context_length=1 << 18, bundle="b", kv_layout="l")


def worker_of(worker_id: str, *, host: str = "host", tokens_per_s: float = TOKENS_PER_S) -> InstanceRecord:
    worker = WorkerRecord(
        model=CARD,
        engine="mock",
        total_blocks=100_000,
        max_num_seqs=SLOTS,
        max_batched_tokens=8192,
        prefill_tokens_per_s=tokens_per_s,
        decode_step_s=STEP_S,
    )
    return InstanceRecord(
        service="worker",
        instance_id=worker_id,
        incarnation=1,
        host_id=host,
        version="1",
        started_ms=0,
        worker=worker,
    )


def load_of(
    worker_id: str, running: int, waiting_tokens: int, *, ids: Sequence[str] = (), tokens_per_s: float = TOKENS_PER_S
) -> LoadReport:
    return LoadReport(
        instance_id=worker_id,
        incarnation=1,
        model=MODEL,
        running=running,
        waiting=0,
        waiting_tokens=waiting_tokens,
        used_blocks=0,
        total_blocks=100_000,
        kv_seq=0,
        prefill_tokens_per_s=tokens_per_s,
        decode_step_s=STEP_S,
        request_ids=tuple(ids),
    )
