"""Records, reports and requests of a small cluster, as a router is told of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvbus_wire.indexer import Match
from kvbus_wire.load import LoadReport
from kvbus_wire.records import InstanceRecord, KvbmRecord, ModelCard, WorkerRecord
from kvbus_wire.request import AgentHints, SessionRef
from kvbus_wire.router import RouteRequest

MODEL = "m"


def chain(*numbers: int) -> bytes:
    return b"".join(n.to_bytes(16, "little") for n in numbers)


def worker_record(
    worker_id: str,
    *,
    incarnation: int = 1,
    host: str = "h",
    slots: int = 4,
    rate: float = 1000.0,
    role: str = "both",
    draining: bool = False,
    block_bytes: int = 0,
    taints: Sequence[str] = (),
    reads_remote: bool = False,
    transfers: Sequence[str] = (),
    layout: str = "l",
) -> InstanceRecord:
    card = ModelCard(name=MODEL, fingerprint="f", block_size=16, context_length=4096, bundle="b", kv_layout=layout)
    worker = WorkerRecord(
        model=card,
        engine="mock",
        total_blocks=100,
        max_num_seqs=slots,
        max_batched_tokens=512,
        prefill_tokens_per_s=rate,
        decode_step_s=0.01,
        role=role,
        block_bytes=block_bytes,
        taints=tuple(taints),
        reads_remote=reads_remote,
        transfers=tuple(transfers),
    )
    return InstanceRecord(
        service="worker",
        instance_id=worker_id,
        incarnation=incarnation,
        host_id=host,
        version="1",
        started_ms=0,
        draining=draining,
        worker=worker,
    )


def kvbm_record(host: str = "h", bytes_per_s: float = 0.0) -> InstanceRecord:
    return InstanceRecord(
        service="kvbm",
        instance_id=f"kvbm-{host}",
        incarnation=1,
        host_id=host,
        version="1",
        started_ms=0,
        kvbm=KvbmRecord(g2_bytes=1, onboard_bytes_per_s=bytes_per_s),
    )


def request(
    request_id: str = "r",
    *,
    keys: bytes = b"",
    prompt_tokens: int = 100,
    priority: int = 0,
    strict: int = 0,
    pinned: str | None = None,
    allowed: Sequence[str] = (),
    excluded: Sequence[str] = (),
    model: str = MODEL,
    session: str = "",
    **more: Any,
) -> RouteRequest:
    """``more``: further fields of the request."""
    return RouteRequest(
        request_id=request_id,
        model=model,
        keys=keys,
        prompt_tokens=prompt_tokens,
        max_tokens=50,
        deadline_ms=0,
        hints=AgentHints(priority=priority, strict_priority=strict),
        pinned=pinned,
        allowed=tuple(allowed),
        excluded=tuple(excluded),
        session=SessionRef(id=session) if session else None,
        **more,
    )


def g1(worker_id: str, depth: int) -> Match:
    return Match(instance_id=worker_id, tier="g1", depth=depth)


def report(
    worker_id: str,
    *,
    running: int = 0,
    waiting_tokens: int = 0,
    ids: Sequence[str] = (),
    used_blocks: int = 0,
    rate: float = 1000.0,
    onboard: Mapping[str, float] | None = None,
    prefills: Sequence[str] = (),
    handover_s: float = 0.0,
) -> LoadReport:
    return LoadReport(
        instance_id=worker_id,
        incarnation=1,
        model=MODEL,
        running=running,
        waiting=0,
        waiting_tokens=waiting_tokens,
        used_blocks=used_blocks,
        total_blocks=100,
        kv_seq=0,
        prefill_tokens_per_s=rate,
        decode_step_s=0.01,
        request_ids=tuple(ids),
        onboard_tokens_per_s=dict(onboard or {}),
        prefill_ids=tuple(prefills),
        handover_s=handover_s,
    )
