"""Settings of the worker."""

import difflib
from collections.abc import Callable, Collection
from typing import Annotated

from kvbus_parsers import names
from kvbus_runtime.settings import CommonSettings, Flag


class WorkerSettings(CommonSettings, frozen=True, kw_only=True):
    """Zero means "the engine decides" for sizes that an engine can derive."""

    model: Annotated[str, Flag("model folder (config.json, tokenizer.json, weights)", metavar="DIR")] = ""
    served_model_name: Annotated[str, Flag("name of the model in the API (empty: the folder's name, or mock)")] = ""
    engine: Annotated[str, Flag("torch, mock, or the name of an entry point in the group kvbus.engines")] = "torch"
    tool_call_parser: Annotated[
        str,
        Flag(
            "format of the model's tool calls: auto (told from its chat template), none, hermes, qwen3_coder, ...",
            also=("--dyn-tool-call-parser",),
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Flag(
            "format of the model's thoughts: auto (told from its chat template), none, qwen3, deepseek_r1, ...",
            also=("--dyn-reasoning-parser",),
        ),
    ] = "auto"
    taints: Annotated[
        str, Flag("what requests can ask for or prefer this worker by (routing_constraints), separated by commas")
    ] = ""
    role: Annotated[
        str,
        Flag(
            "both: computes its own prompts; prefill: computes those of others; decode: has them computed",
            choices=("both", "prefill", "decode"),
        ),
    ] = "both"

    device: Annotated[str, Flag("where a computing engine runs: cpu, cuda, cuda:1, ...")] = "cpu"
    dtype: Annotated[str, Flag("data type of a computing engine; auto: float32 on CPUs, bfloat16 on GPUs")] = "auto"
    block_size: Annotated[int, Flag("tokens per KV block")] = 16
    kv_blocks: Annotated[int, Flag("KV blocks in G1 (0: from --kv-bytes)")] = 0
    kv_bytes: Annotated[int, Flag("memory for KV blocks in bytes, when --kv-blocks is 0 (0: the engine decides)")] = 0
    max_num_seqs: Annotated[int, Flag("sequences that run at once (0: the engine decides)")] = 0
    max_batched_tokens: Annotated[int, Flag("tokens computed in one step (0: the engine decides)")] = 0
    max_waiting: Annotated[int, Flag("requests that wait; more are refused (0: the engine decides)")] = 0
    context_length: Annotated[int, Flag("longest prompt plus output in tokens (0: the model's)")] = 0
    threads: Annotated[int, Flag("threads of a computing engine (0: the engine decides)")] = 0

    max_grammar_bytes: Annotated[int, Flag("guidance: schemas and grammars of one request")] = 1 << 20
    grammar_check_s: Annotated[int, Flag("guidance: processor time for trying out a schema or grammar")] = 3
    grammar_cache_entries: Annotated[int, Flag("guidance: compiled grammars kept")] = 256
    grammar_cache_bytes: Annotated[int, Flag("guidance: compiled grammars kept, counted by their sources")] = 16 << 20
    max_grammars_waiting: Annotated[int, Flag("guidance: requests whose grammar is being compiled")] = 256

    script: Annotated[str, Flag("mock: what to say, a file of JSON lines", metavar="FILE")] = ""
    mock_speedup: Annotated[float, Flag("mock: divides all step times; inf: no time at all", infinite=True)] = 1.0
    mock_step_base_s: Annotated[float, Flag("mock: fixed time of a step")] = 0.006
    mock_prefill_tokens_per_s: Annotated[float, Flag("mock: prefill rate without attention")] = 20_000.0
    mock_attention_s_per_pair: Annotated[float, Flag("mock: prefill attention per (token, context token)")] = 4e-10
    mock_decode_s_per_seq: Annotated[float, Flag("mock: decode time per sequence")] = 2e-5
    mock_decode_s_per_context_token: Annotated[float, Flag("mock: decode time per token of context")] = 3e-8
    mock_output_tokens: Annotated[int, Flag("mock: length of made-up output that may end by itself")] = 128
    mock_block_bytes: Annotated[int, Flag("mock: size of an exported block (0: it cannot export)")] = 512

    max_requests: Annotated[int, Flag("open requests, those being onboarded included")] = 2048
    recent_requests: Annotated[int, Flag("ended request ids remembered, so that a repeated one is not run again")] = (
        16_384
    )
    max_generate_pending: Annotated[int, Flag("Generate messages handled at once")] = 256
    frontend_grace_s: Annotated[float, Flag("how long a vanished frontend's requests go on")] = 5.0
    heartbeat_s: Annotated[float, Flag("silence on a token stream is broken this often")] = 1.0
    replay_frames: Annotated[int, Flag("step frames kept per frontend for replay")] = 4096
    replay_bytes: Annotated[int, Flag("bytes of step frames kept per frontend for replay")] = 16 << 20
    load_min_interval_s: Annotated[float, Flag("least time between load reports")] = 0.25
    load_idle_interval_s: Annotated[float, Flag("time between load reports when nothing changes")] = 2.0
    snapshot_limit: Annotated[int, Flag("block snapshots held at once")] = 4
    snapshot_ttl_s: Annotated[float, Flag("a block snapshot is kept this long after its last chunk")] = 30.0
    snapshot_chunk_blocks: Annotated[int, Flag("blocks per chunk of a block snapshot")] = 16_384

    transfer: Annotated[bool, Flag("hand blocks over to, and read them from, other workers of the model")] = True
    transfer_backends: Annotated[
        str, Flag("ways to do that, in the order of preference: shm, nixl, ucx, tcp (tcp is always there)")
    ] = "shm,tcp"
    transfer_host: Annotated[str, Flag("address at which other workers read blocks")] = "127.0.0.1"
    transfer_port: Annotated[int, Flag("port of it (0: any free one)")] = 0
    transfer_advertise: Annotated[str, Flag("host name that others use for it (empty: the address)")] = ""
    transfer_secret: Annotated[
        str,
        Flag(
            "who does not know it gets no blocks; the same at all workers (empty: grants alone protect them)",
            secret=True,
        ),
    ] = ""
    staging_bytes: Annotated[int, Flag("memory from which others read blocks; made when first needed")] = 64 << 20
    max_remote_prefills: Annotated[int, Flag("prompts computed for others at once; more are refused")] = 128
    prefill_lease_s: Annotated[
        float, Flag("after so long a silence of who wanted a prompt computed its blocks are given up")
    ] = 15.0
    prefill_stall_s: Annotated[float, Flag("when no block comes for so long, the rest is computed here")] = 10.0
    prefill_wait_s: Annotated[float, Flag("the longest answer to a question for more blocks")] = 2.0
    prefill_timeout_s: Annotated[float, Flag("limit of one request to the worker that computes a prompt")] = 2.0
    prefill_chunk_blocks: Annotated[int, Flag("blocks handed over at once")] = 64
    prefill_min_blocks: Annotated[int, Flag("fewer blocks are never asked for")] = 2
    prefill_rest_s: Annotated[float, Flag("a worker that did not answer is not asked for prompts for so long")] = 5.0
    prefill_forget_s: Annotated[
        float, Flag("measured times of prompts computed elsewhere count for so long; then they are found out anew")
    ] = 30.0
    prefill_parallel: Annotated[
        int, Flag("prompts that others compute for this worker at once; more are computed here")
    ] = 64

    kv_events: Annotated[
        bool, Flag("tell the indexers which blocks it holds (--no-kv-events: they guess from what is sent here)")
    ] = True
    kvbm: Annotated[bool, Flag("use the kvbm of this host, if there is one")] = True
    g1_pin_share: Annotated[float, Flag("part of G1 that the pinned blocks of one tenant may take")] = 0.5
    max_retention_ranges: Annotated[int, Flag("token ranges of one request that say how long to keep them")] = 256
    prefetch_parallel: Annotated[int, Flag("prefetches that run at once; more are answered with what is there")] = 8
    kvbm_timeout_s: Annotated[float, Flag("limit of one request to kvbm")] = 2.0
    kvbm_retry_s: Annotated[float, Flag("after a failure kvbm is left alone this long")] = 2.0
    offload_queue_blocks: Annotated[int, Flag("blocks that wait for write-through; more push the oldest out")] = 8192
    offload_batch_blocks: Annotated[int, Flag("blocks written through at once")] = 256
    offload_batch_bytes: Annotated[int, Flag("bytes written through at once, as far as that is a block")] = 16 << 20
    offload_gather_s: Annotated[float, Flag("new blocks wait this long for others before they are written through")] = (
        0.1
    )
    offload_repair_s: Annotated[float, Flag("least time between whole chains offered to a kvbm that lost a part")] = 5.0
    onboard_timeout_s: Annotated[float, Flag("onboarding that takes longer is given up: recompute")] = 5.0
    onboard_batch_blocks: Annotated[int, Flag("blocks copied and imported at once")] = 256
    onboard_batch_bytes: Annotated[int, Flag("bytes copied and imported at once, as far as that is a block")] = 16 << 20
    onboard_max_blocks: Annotated[int, Flag("blocks onboarded for one request")] = 16_384
    onboard_min_blocks: Annotated[int, Flag("shorter runs are not worth asking for")] = 1
    onboard_probe_s: Annotated[float, Flag("a lower tier slower than computing is tried again this often")] = 10.0
    onboard_parallel: Annotated[int, Flag("requests that onboard at once; more recompute")] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = (
            "block_size",
            "max_grammar_bytes",
            "grammar_check_s",
            "grammar_cache_entries",
            "grammar_cache_bytes",
            "max_grammars_waiting",
            "max_requests",
            "recent_requests",
            "max_generate_pending",
            "replay_frames",
            "replay_bytes",
            "snapshot_limit",
            "snapshot_chunk_blocks",
            "offload_queue_blocks",
            "offload_batch_blocks",
            "offload_batch_bytes",
            "onboard_batch_blocks",
            "onboard_batch_bytes",
            "onboard_min_blocks",
            "onboard_max_blocks",
            "onboard_parallel",
            "max_retention_ranges",
            "prefetch_parallel",
            "mock_speedup",
            "mock_prefill_tokens_per_s",
            "mock_output_tokens",
            "heartbeat_s",
            "load_min_interval_s",
            "load_idle_interval_s",
            "snapshot_ttl_s",
            "kvbm_timeout_s",
            "kvbm_retry_s",
            "onboard_timeout_s",
            "onboard_probe_s",
            "offload_repair_s",
            "staging_bytes",
            "max_remote_prefills",
            "prefill_lease_s",
            "prefill_stall_s",
            "prefill_wait_s",
            "prefill_timeout_s",
            "prefill_chunk_blocks",
            "prefill_min_blocks",
            "prefill_parallel",
            "prefill_rest_s",
            "prefill_forget_s",
        )
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")
        not_negative = (
            "max_num_seqs",
            "max_batched_tokens",
            "max_waiting",
            "kv_blocks",
            "kv_bytes",
            "context_length",
            "threads",
            "frontend_grace_s",
            "offload_gather_s",
            "mock_block_bytes",
            "mock_step_base_s",
            "mock_attention_s_per_pair",
            "mock_decode_s_per_seq",
            "mock_decode_s_per_context_token",
        )
        for name in not_negative:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative")
        if not 0 <= self.g1_pin_share <= 1:
            raise ValueError("g1_pin_share is a part of the whole: from 0 to 1")
        _check_parser("tool_call_parser", self.tool_call_parser, names.tool_format, names.tool_formats)
        _check_parser("reasoning_parser", self.reasoning_parser, names.reasoning_format, names.reasoning_formats)
        unknown = set(self.transfer_names) - {"shm", "nixl", "ucx", "tcp"}
        if unknown:
            raise ValueError(
                f"transfer_backends: there is no {', '.join(sorted(unknown))}; there are shm, nixl, ucx, tcp"
            )
        if not 0 <= self.transfer_port <= 65535:
            raise ValueError("transfer_port must be 0..65535")
        everywhere = self.transfer_host in ("", "0.0.0.0", "::")  # noqa: S104
        if self.transfer and everywhere and not self.transfer_advertise:
            raise ValueError(
                f"transfer_advertise is needed with transfer_host {self.transfer_host!r}: nobody connects to that"
            )
        if not self.model and self.engine == "torch":
            raise ValueError("engine torch needs --model")
        if self.script and self.engine != "mock":
            raise ValueError("--script is for --engine mock")

    @property
    def transfer_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name.strip() for name in self.transfer_backends.split(",") if name.strip()))

    @property
    def taint_names(self) -> tuple[str, ...]:
        return tuple(sorted({name.strip() for name in self.taints.split(",")} - {""}))

    @property
    def model_name(self) -> str:
        if self.served_model_name:
            return self.served_model_name
        return self.model.rstrip("/").rpartition("/")[2] or "mock"


def _check_parser(setting: str, name: str, find: Callable[[str], object], known: Callable[[], Collection[str]]) -> None:
    """Raise ValueError, with names like this one."""
    if name in ("auto", "none"):
        return
    try:
        find(name)
    except names.UnknownFormatError:
        close = difflib.get_close_matches(name.lower(), known(), cutoff=0.7)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(sorted(known()))}"
        raise ValueError(f"{setting}: there is no parser {name!r}; {hint}") from None
