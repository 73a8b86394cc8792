"""One sample of every bus message, with every field set.

``python -m kvbus_testkit.wire_samples tests/unit/wire/golden`` writes the golden files that do not exist yet.
"""

import sys
from pathlib import Path

from kvbus_wire.checkpoint import CheckpointFeed, CheckpointHeader
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.frontend import CancelResponse, Delta, Ended, Started, StepFrame, TokenLogprob, Usage
from kvbus_wire.guidance import CallSection, FreeBlock, Guidance, GuidedArgument, GuidedCall
from kvbus_wire.indexer import (
    DescribeIndex,
    DigestIndex,
    FeedDigest,
    IndexDescription,
    IndexDigest,
    IndexQuery,
    IndexReply,
    IndexUse,
    Match,
    ModelUse,
    RankPrefixes,
    SilentWorker,
    UsedPrefix,
)
from kvbus_wire.kv_events import Cleared, KvEvents, Removed, Stored
from kvbus_wire.kv_tools import (
    BlockState,
    DescribedTiers,
    DescribeTiers,
    EvictBlocks,
    InspectBlocks,
    ListBlocks,
    ListedBlocks,
    TierHolding,
    TierState,
    VerifiedBlocks,
    VerifyBlocks,
    WarmBlocks,
    WarmedBlocks,
)
from kvbus_wire.kvbm import (
    AttachedPool,
    AttachPool,
    BlockDirective,
    CommitBlocks,
    DropBlocks,
    DroppedBlocks,
    PinBlocks,
    PinnedBlocks,
    ReleaseLease,
    ReserveBlocks,
    ReservedBlocks,
    RetainBlocks,
    Retained,
    Slot,
)
from kvbus_wire.load import LoadReport
from kvbus_wire.message import Message, encode
from kvbus_wire.records import InstanceRecord, KvbmRecord, ModelCard, WorkerRecord
from kvbus_wire.request import AgentHints, MockOutput, Retention, Sampling, SessionRef, Stopping
from kvbus_wire.router import (
    Decision,
    ExplainPlaced,
    ExplainRoute,
    GetLimits,
    OnboardTerm,
    Placement,
    Progress,
    RouteExplanation,
    RouteRequest,
    RouterLimits,
    SetLimits,
    StoredLimits,
    WorkerLimits,
    WorkerTerms,
)
from kvbus_wire.worker import (
    Accepted,
    BlockSnapshot,
    BlockSnapshotChunk,
    Cancel,
    Done,
    Drain,
    Generate,
    NeedTokens,
    Prefetch,
    Prefetched,
    ReplayedSteps,
    ReplaySteps,
    SnapshotChain,
)

KEY_A, KEY_B = bytes(range(16)), bytes(range(16, 32))
KEYS = KEY_A + KEY_B
HINTS = AgentHints(
    priority=3, strict_priority=1, osl=200, latency_sensitivity=0.5, speculative_prefill=True, input_trigger="tool"
)
SESSION = SessionRef(id="session-1", parent="session-0", final=True, ephemeral=True)
ERROR = ErrorReply(
    code=ErrorCode.OVERLOADED,
    message="try later",
    retryable=True,
    retry_after_s=1.5,
    param="model",
    details={"limit": 10, "share": 0.5, "queue": "full"},
)
USAGE = Usage(
    prompt_tokens=100,
    output_tokens=7,
    cached_tokens=64,
    onboarded_tokens=16,
    queue_s=0.25,
    prefill_s=0.5,
    unpinned_tokens=32,
)
DIRECTIVE = BlockDirective(start=1, end=2, kind="pinned", priority=5, ttl_s=300.0, tenant="t")
CARD = ModelCard(
    name="org/model.v1",
    fingerprint="f00d",
    block_size=16,
    context_length=4096,
    bundle="ab" * 32,
    kv_layout="fp32-paged-1",
    eos_token_ids=(2, 5),
    created_s=1_700_000_000,
    tool_call_parser="hermes",
    reasoning_parser="qwen3",
)
GUIDANCE = Guidance(
    form="json_schema",
    text='{"type":"object"}',
    strict=True,
    param="response_format",
    section=CallSection(
        calls=(
            GuidedCall(
                begin="<function=f>",
                end="</function>",
                schema='{"type":"object"}',
                arguments=(
                    GuidedArgument(begin="<a>", kind="json", end="</a>", text='{"type":"integer"}', required=True),
                ),
                any_content=True,
                strict=True,
                param="tools[0].function.parameters",
            ),
        ),
        begin="<calls>",
        end="</calls>",
        separator="\n",
        trigger="<calls>",
        parallel=False,
    ),
    blocks=(FreeBlock(begin="<think>", end="</think>"),),
    open_block=True,
    lead="<answer>",
    tail="</answer>",
)
ROUTE_REQUEST = RouteRequest(
    request_id="r1",
    model="m",
    keys=KEYS,
    prompt_tokens=40,
    max_tokens=100,
    deadline_ms=1_700_000_060_000,
    hints=HINTS,
    session=SESSION,
    tenant="t",
    pinned="worker-1",
    allowed=("worker-1", "worker-2"),
    excluded=("worker-3",),
    required_taints=("h200",),
    preferred_taints={"rack-1": 0.5},
    explain=True,
    speculative=True,
)
EXPLANATION = RouteExplanation(
    request_id="r1",
    router_id="router-1",
    model="m",
    policy="kv",
    prompt_tokens=70,
    worker_id="worker-1",
    queued_s=0.5,
    ttft_s=0.125,
    session_worker_id="worker-1",
    workers=(
        WorkerTerms(
            worker_id="worker-1",
            cost_s=0.4,
            ttft_s=0.25,
            wait_s=0.125,
            prefill_s=0.0625,
            work_s=0.03125,
            decode_s=0.5,
            affinity_s=0.1,
            taint_factor=0.5,
            cached_tokens=32,
            inflight_tokens=16,
            onboard=(OnboardTerm(source="g2", tokens=16, seconds=0.0625),),
            uncached_tokens=6,
            waiting_tokens=10,
            active=3,
            running=2,
            prefill_tokens_per_s=96.0,
            decode_step_s=0.25,
        ),
        WorkerTerms(worker_id="worker-2", verdict="draining"),
    ),
    left_out=7,
    policy_class="batch",
    tenant="acme",
)
WORKER_LIMITS = WorkerLimits(
    max_requests_per_worker=8,
    worker_limit_factor=1.5,
    busy_used_blocks_share=0.75,
    busy_waiting_tokens=50_000,
    cordoned=("worker-3",),
)

SAMPLES: tuple[Message, ...] = (
    ERROR,
    StepFrame(
        worker_id="worker-1",
        incarnation=1_700_000_000_000,
        seq=9,
        started=(Started("r1", 64, 16),),
        deltas=(Delta("r1", 3, b"\x01\x00\x00\x00\x02\x00\x00\x00", (TokenLogprob(1, -0.5, ((1, -0.5), (7, -1.5))),)),),
        ended=(Ended(request_id="r2", reason="error", usage=USAGE, stop_token_id=2, error=ERROR),),
    ),
    CancelResponse(response_id="resp_0"),
    IndexQuery(model="m", keys=KEYS, counts=False),
    IndexReply(matches=(Match(instance_id="worker-1", tier="g1", depth=2, predicted=True),)),
    DescribeIndex(),
    IndexDescription(
        indexer_id="indexer-1",
        caught_up=True,
        stream="2026-11-30T10:00:00Z",
        position=1000,
        entries=500,
        blocks=400,
        instances=3,
        in_repair=1,
        partial=2,
        predicted_entries=7,
        checkpoint_age_s=12.5,
        silent=(SilentWorker(instance_id="worker-2", why="silent"),),
    ),
    DigestIndex(feeds=True),
    IndexDigest(
        indexer_id="indexer-1",
        position=1000,
        entries=500,
        digest="00ff",
        feeds=(
            FeedDigest(
                instance_id="worker-1",
                incarnation=5,
                model="m",
                tier="g1",
                kv_seq=7,
                entries=500,
                key_sum=(1 << 64) - 1,
            ),
        ),
    ),
    RankPrefixes(model="m", limit=5),
    IndexUse(
        indexer_id="indexer-1",
        models=(ModelUse(model="m", asked=100, found=90, stored=10, removed=2, blocks=8, entries=12),),
        prefixes=(UsedPrefix(model="m", key=(1 << 64) - 1, depth=2, reads=12.5, owners=3),),
    ),
    CheckpointHeader(
        version=1, stream="2026-11-30T10:00:00Z", stream_seq=1000, indexer_id="indexer-1", saved_ms=1_700_000_000_000
    ),
    CheckpointFeed(
        instance_id="worker-1",
        incarnation=5,
        model="m",
        tier="g1",
        kv_seq=7,
        keys=bytes(range(16)),
        lengths=b"\x02\x00\x00\x00",
        parents=bytes(range(8)),
    ),
    KvEvents(
        instance_id="worker-1",
        incarnation=5,
        model="m",
        first_seq=7,
        events=(Stored(KEY_A, KEY_B), Removed(KEYS), Cleared()),
        tier="g2",
        block_size=32,
        at_ms=1_700_000_000_123,
    ),
    AttachPool(instance_id="worker-1", incarnation=5, model="m", kv_layout="l", block_bytes=4096, block_size=32),
    AttachedPool(pool_id="p", path="/dev/shm/pool", slot_bytes=4096, slots=128),  # noqa: S108
    ReserveBlocks(pool_id="p", instance_id="worker-1", parent=KEY_A, keys=KEY_B, directives=(DIRECTIVE,)),
    ReservedBlocks(lease_id="l", lease_s=5.0, slots=(Slot(index=1, generation=2, checksum=3), None)),
    CommitBlocks(lease_id="l", checksums=(2**64 - 1, None)),
    PinBlocks(pool_id="p", instance_id="worker-1", keys=KEYS, wait_s=0.5, parent=b"p" * 16),
    PinnedBlocks(lease_id="l", lease_s=5.0, slots=(Slot(index=1, generation=2, checksum=3),), coming=64),
    ReleaseLease(lease_id="l", corrupt=(1, 3)),
    RetainBlocks(pool_id="p", instance_id="worker-1", keys=KEYS, directives=(DIRECTIVE,)),
    Retained(unpinned=(0, 1)),
    DropBlocks(model="m", keys=KEYS),
    DroppedBlocks(blocks={"g2": 2}),
    LoadReport(
        instance_id="worker-1",
        incarnation=5,
        model="m",
        running=3,
        waiting=2,
        waiting_tokens=5000,
        used_blocks=10,
        total_blocks=100,
        kv_seq=77,
        prefill_tokens_per_s=5000.0,
        decode_step_s=0.02,
        draining=True,
        request_ids=("r1", "r2"),
        onboard_tokens_per_s={"g2": 250_000.0},
        output_tokens=b"\x07\x00\x00\x00\x00\x00\x00\x00",
        seq=9,
        ids_cut=True,
    ),
    InstanceRecord(
        service="worker",
        instance_id="worker-1",
        incarnation=5,
        host_id="host-1",
        version="0.1.0",
        started_ms=1_700_000_000_000,
        draining=True,
        health_url="http://127.0.0.1:9000",
        worker=WorkerRecord(
            model=CARD,
            engine="torch",
            total_blocks=100,
            max_num_seqs=8,
            max_batched_tokens=512,
            prefill_tokens_per_s=300.0,
            decode_step_s=0.1,
            role="decode",
            guidance=True,
            taints=("h200", "rack-1"),
            reads_remote=True,
            kv_events=False,
        ),
        kvbm=KvbmRecord(g2_bytes=1 << 30, onboard_bytes_per_s=1e9, g3_bytes=1 << 34, g4_store="store-1"),
    ),
    ROUTE_REQUEST,
    Placement(
        request_id="r1",
        worker_id="worker-1",
        incarnation=5,
        cached_tokens=32,
        onboard_tokens=16,
        policy="kv",
        queued_s=0.5,
        explanation=EXPLANATION,
    ),
    Progress(request_id="r1", model="m", phase="finished", output_tokens=12),
    Decision(
        router_id="router-1",
        request_id="r1",
        model="m",
        worker_id="worker-1",
        incarnation=5,
        prompt_tokens=40,
        uncached_tokens=8,
        expected_output=100,
        keys=KEYS,
        session_id="session-1",
        tenant="t",
        decided_ms=1_700_000_000_123,
        policy_class="batch",
    ),
    ExplainRoute(request=ROUTE_REQUEST),
    ExplainPlaced(request_id="r1"),
    EXPLANATION,
    GetLimits(),
    SetLimits(limits=WORKER_LIMITS, reset=("busy_waiting_tokens",), cordon=("worker-4",), uncordon=("worker-3",)),
    RouterLimits(router_id="router-1", revision=3, in_force=WORKER_LIMITS, stored=WorkerLimits(cordoned=())),
    StoredLimits(limits=WORKER_LIMITS),
    Generate(
        request_id="r1",
        model="m",
        frontend_id="frontend-1",
        tokens=b"\x01\x00\x00\x00",
        sampling=Sampling(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            seed=7,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            repetition_penalty=1.1,
            logit_bias={5: -100.0},
            logprobs=3,
        ),
        stopping=Stopping(max_tokens=100, min_tokens=1, stop_token_ids=(2,), ignore_eos=True),
        deadline_ms=1_700_000_060_000,
        prefix_key=KEY_A,
        prefix_tokens=16,
        resumed=1,
        cache_salt="salt",
        lora="adapter",
        hints=HINTS,
        session=SESSION,
        retention=(Retention(start=16, end=32, priority=5, ttl_s=300.0, kind="pinned"),),
        mock=MockOutput(output="hi", finish="length", chunks=("h", "i")),
        trace="00-abc-def-01",
        guidance=GUIDANCE,
        speculative=True,
        tenant="t",
    ),
    Prefetch(
        request_id="r1",
        model="m",
        tokens=b"\x01\x00\x00\x00",
        deadline_ms=1_700_000_060_000,
        prefix_key=KEY_A,
        prefix_tokens=16,
        cache_salt="salt",
        lora="adapter",
        retention=(Retention(start=16, end=32, priority=5, ttl_s=300.0, kind="pinned"),),
        tenant="t",
    ),
    DescribeTiers(),
    DescribedTiers(
        instance_id="kvbm-1",
        host_id="host-1",
        tiers=(
            TierState(
                tier="g3",
                blocks=3,
                used_bytes=300,
                capacity_bytes=1000,
                available=False,
                hits=1,
                misses=2,
                stored=3,
                refused=4,
                corrupt=5,
                failures=6,
                evictions={"normal": 7},
                holdings=(TierHolding(model="m", kv_layout="l", block_bytes=100, block_size=16, blocks=3, pinned=1),),
            ),
        ),
        g4_store="file:///store",
    ),
    ListBlocks(model="m", tier="g3", after=KEY_A, limit=10),
    InspectBlocks(model="m", keys=KEY_A + KEY_B),
    ListedBlocks(
        blocks=(
            BlockState(
                tier="g2",
                key=KEY_A,
                parent=KEY_B,
                depth=1,
                kind="pinned",
                priority=5,
                ttl_s=300.0,
                tenant="t",
                users=1,
            ),
        ),
        after=KEY_A,
    ),
    VerifyBlocks(model="m", tier="g3", after=KEY_A, limit=10),
    VerifiedBlocks(checked=10, bad=KEY_A, after=KEY_B),
    EvictBlocks(model="m", tier="g3", keys=KEY_A),
    WarmBlocks(model="m", keys=KEY_A, wait_s=1.0),
    WarmedBlocks(present=1, coming=2),
    Prefetched(request_id="r1", cached_tokens=32, onboarded_tokens=16),
    Accepted(request_id="r1", incarnation=5),
    NeedTokens(request_id="r1"),
    Cancel(request_id="r1", reason="client closed"),
    Done(),
    ReplaySteps(frontend_id="frontend-1", incarnation=5, first_seq=3, last_seq=9),
    ReplayedSteps(frames=(b"frame",)),
    Drain(),
    BlockSnapshot(cursor=10, snapshot_id="s"),
    BlockSnapshotChunk(
        snapshot_id="s",
        instance_id="worker-1",
        incarnation=5,
        model="m",
        tier="g1",
        kv_seq=77,
        chains=(SnapshotChain(parent=KEY_A, keys=KEY_B),),
        next_cursor=20,
    ),
)


def tag_of(message: Message) -> str:
    return str(type(message).__struct_config__.tag)


def golden_file(folder: Path, message: Message) -> Path:
    return folder / f"{tag_of(message)}.hex"


def write_missing(folder: Path) -> None:
    """Existing files are never overwritten: bytes on the bus may not change."""
    for message in SAMPLES:
        file = golden_file(folder, message)
        if not file.exists():
            text = encode(message).hex(" ", 1)
            lines = [text[i : i + 96].rstrip() for i in range(0, len(text), 96)]
            file.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_missing(Path(sys.argv[1]))
