"""Instance records: who is there. Each lies under a lease in the key-value bucket; an expired record means the instance is
gone."""

from kvbus_wire.message import Message, Part


class ModelCard(Part, frozen=True):
    """All that a frontend needs to serve a model without having its files.

    ``fingerprint``: hash of the weights' identity and config, part of the cache domain. ``bundle``: name of the object with the
    tokenizer, chat template and generation config (a tar, named by its SHA-256).
    ``kv_layout``: fingerprint of dtype and block layout.
    ``tool_call_parser``, ``reasoning_parser``: formats of the model's output; auto: the frontend tells them from the bundle;
    none: off.
    """

    name: str
    fingerprint: str
    block_size: int
    context_length: int
    bundle: str
    kv_layout: str
    eos_token_ids: tuple[int, ...] = ()
    created_s: int = 0
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"


class WorkerRecord(Part, frozen=True):
    """``role``: both, prefill or decode. ``block_bytes``: size of one KV block that leaves the engine, 0 when none can.
    ``guidance``: the engine constrains output by `kvbus_wire.guidance`. ``taints``: what requests can ask for or prefer by name.
    ``reads_remote``: it can read KV blocks from other workers of its model. ``kv_events``: it tells which blocks it holds; false:
    the indexer has to guess from what is sent there. ``transfers``: ways in which it moves blocks to and from other workers (shm,
    tcp, ..; empty: it does not). ``handover``: kind of engine that moves blocks itself."""

    model: ModelCard
    engine: str
    total_blocks: int
    max_num_seqs: int
    max_batched_tokens: int
    prefill_tokens_per_s: float
    decode_step_s: float
    role: str = "both"
    block_bytes: int = 0
    guidance: bool = False
    taints: tuple[str, ...] = ()
    reads_remote: bool = False
    kv_events: bool = True
    transfers: tuple[str, ...] = ()
    handover: str = ""


class KvbmRecord(Part, frozen=True):
    """``onboard_bytes_per_s``: what a worker of this host can expect when it reads blocks back. ``g4_store``: identity of the
    cluster store; instances with the same one read each other's blocks there (empty: none)."""

    g2_bytes: int
    onboard_bytes_per_s: float = 0.0
    g3_bytes: int = 0
    g4_store: str = ""


class InstanceRecord(Message, frozen=True):
    """``host_id``: instances with the same one share memory. ``incarnation`` grows with each start of the same id.
    ``loading``: name of the model that a worker is loading; until its record has a ``worker`` nothing is sent to it."""

    service: str
    instance_id: str
    incarnation: int
    host_id: str
    version: str
    started_ms: int
    draining: bool = False
    health_url: str = ""
    worker: WorkerRecord | None = None
    kvbm: KvbmRecord | None = None
    loading: str = ""
