"""Settings of the frontend."""

from typing import Annotated

from kvbus_frontend.core.aliases import Aliases
from kvbus_frontend.core.stability import Stability
from kvbus_frontend.core.tenants import TenantSource
from kvbus_runtime.settings import CommonSettings, Flag


class FrontendSettings(CommonSettings, frozen=True, kw_only=True):
    """Sizes in bytes or as named, times in seconds."""

    http_host: Annotated[str, Flag("address of the HTTP API")] = "127.0.0.1"
    http_port: Annotated[int, Flag("port of the HTTP API (0: any free one)")] = 8000
    api_key: Annotated[str, Flag("keys that clients must send as Bearer token, separated by commas", secret=True)] = ""

    tenant_source: Annotated[
        str,
        Flag(
            "whom a request counts for, where turns and limits are shared: its salt (x-tenant-id), its API key, or auto: the salt, "
            "else the key",
            choices=tuple(TenantSource),
        ),
    ] = TenantSource.AUTO

    enable_openai_api: Annotated[bool, Flag("serve /v1/chat/completions, /v1/completions and /v1/responses")] = True
    enable_anthropic_api: Annotated[bool, Flag("serve /v1/messages")] = True
    strip_anthropic_preamble: Annotated[
        bool, Flag("drop Claude Code's billing line, which differs per session, from system prompts")
    ] = True
    keep_volatile: Annotated[
        str, Flag("rules of prompt stability that are off, separated by commas", metavar="NAMES")
    ] = ""
    enable_streaming_tool_dispatch: Annotated[
        bool, Flag("announce each finished call on Chat Completions by event: tool_call_dispatch")
    ] = False
    enable_streaming_reasoning_dispatch: Annotated[
        bool, Flag("announce each finished thought on Chat Completions by event: reasoning_dispatch")
    ] = False
    reasoning_field: Annotated[
        str, Flag("Chat Completions: where thoughts are", choices=("reasoning_content", "reasoning", "both"))
    ] = "reasoning_content"

    model_aliases: Annotated[
        str, Flag("other names of models: alias=model, separated by commas (*=model: any name)", metavar="PAIRS")
    ] = ""

    max_body_bytes: Annotated[int, Flag("largest request body, unpacked")] = 32 << 20
    max_messages: Annotated[int, Flag("most messages of one request")] = 10_000
    max_tools: Annotated[int, Flag("most tools of one request")] = 1024
    max_schema_bytes: Annotated[int, Flag("largest JSON Schema that output is constrained by")] = 256 << 10
    max_schema_depth: Annotated[int, Flag("schemas within schemas of one that output is constrained by")] = 64
    max_choices: Annotated[int, Flag("most choices (n, times prompts) of one request")] = 64
    max_concurrent_requests: Annotated[int, Flag("more generation requests than this are told to come back")] = 1024
    max_output_tokens: Annotated[
        int, Flag("longest answer in tokens; more is clamped (0: what the context leaves)")
    ] = 0
    max_models: Annotated[int, Flag("most models loaded at a time")] = 64
    absent_model_s: Annotated[float, Flag("a model that has lost its last worker gets 503 this long, then 404")] = 600.0

    session_tools_bytes: Annotated[
        int, Flag("memory for the tools of sessions, for requests that condense a history and leave them out")
    ] = 16 << 20
    compaction_max_tokens: Annotated[int, Flag("longest summary of a compacted conversation, in tokens")] = 8192
    response_ttl_s: Annotated[float, Flag("how long stored responses are kept")] = 7 * 86_400.0
    response_store_bytes: Annotated[
        int, Flag("size of the store of responses (reserved on the bus; oldest go first)")
    ] = 1 << 30
    response_store_entries: Annotated[int, Flag("most stored responses; one in parts counts once per 512 KiB")] = (
        100_000
    )
    max_stored_response_bytes: Annotated[int, Flag("a larger response (packed, with its history) is not stored")] = (
        16 << 20
    )
    response_events_bytes: Annotated[int, Flag("size of the events of background responses (reserved on the bus)")] = (
        256 << 20
    )
    response_events_ttl_s: Annotated[float, Flag("how long background responses can be streamed again")] = 3600.0
    response_seal_key: Annotated[
        str,
        Flag(
            "signs what clients carry (thoughts, summaries); empty: one that all frontends share on the bus",
            secret=True,
        ),
    ] = ""
    max_websockets: Annotated[int, Flag("most open WebSocket connections")] = 256
    max_websocket_frames: Annotated[int, Flag("frames of one connection that may wait for their turn")] = 4
    websocket_lifetime_s: Annotated[float, Flag("a WebSocket connection is closed after this time")] = 3600.0

    request_timeout_s: Annotated[float, Flag("longest time for one request as a whole")] = 1800.0
    body_timeout_s: Annotated[float, Flag("longest wait for the next piece of a request body")] = 30.0
    body_total_timeout_s: Annotated[float, Flag("longest time for a request body as a whole")] = 300.0
    route_timeout_s: Annotated[float, Flag("wait for one answer of the router (then it is asked again)")] = 60.0
    generate_timeout_s: Annotated[float, Flag("wait for a worker to accept a request")] = 10.0
    heartbeat_timeout_s: Annotated[float, Flag("a worker that is silent this long has failed")] = 5.0
    route_retries: Annotated[int, Flag("how often an unreachable router is asked again")] = 5
    retry_pause_s: Annotated[float, Flag("pause before the first retry; doubles up to 2 s")] = 0.1
    migration_limit: Annotated[int, Flag("how often a request moves on when its worker fails")] = 3

    speculative_prefill: Annotated[
        str,
        Flag("compute how the next prompt begins once an answer has ended", choices=("asked", "always", "never")),
    ] = "asked"
    max_speculative_prefills: Annotated[int, Flag("predicted prompts that are computed at a time")] = 16
    speculative_prefill_tokens: Annotated[int, Flag("most tokens that are computed of a predicted prompt")] = 32_768
    speculative_prefill_min_tokens: Annotated[int, Flag("with fewer new tokens than this it is not worth it")] = 32
    speculative_prefill_s: Annotated[float, Flag("a predicted prompt that is not computed by then is given up")] = 20.0

    max_sessions: Annotated[int, Flag("most sessions that are remembered (the least recently used go)")] = 100_000
    session_bytes: Annotated[int, Flag("memory for the block keys of sessions")] = 128 << 20
    session_prompt_bytes: Annotated[
        int, Flag("memory for the prompts of sessions, to bring their blocks back (0: none are kept)")
    ] = 256 << 20
    prefetch: Annotated[
        str,
        Flag(
            "bring the blocks of waiting sessions back: never, when asked to, or also when a tool is expected to end",
            choices=("never", "asked", "learned"),
        ),
    ] = "learned"
    prefetch_lead_s: Annotated[float, Flag("how long before the next request is expected")] = 3.0
    prefetch_min_wait_s: Annotated[float, Flag("a tool that is expected to run shorter than this needs none")] = 10.0
    prefetch_s: Annotated[float, Flag("longest time for bringing one prompt back")] = 30.0
    max_prefetches: Annotated[int, Flag("prompts that are brought back at a time")] = 16
    max_planned_prefetches: Annotated[int, Flag("sessions whose blocks are to be brought back later")] = 20_000
    max_tool_times: Annotated[int, Flag("tools (per tenant) whose run times are remembered")] = 10_000
    rest_timeout_s: Annotated[
        float, Flag("listen to a worker so long after it was told to stop, for what it has said in a session by then")
    ] = 2.0
    session_timeout_s: Annotated[float, Flag("wait for other services about sessions and their blocks")] = 5.0

    keep_alive_s: Annotated[float, Flag("a stream that is silent this long gets an event that says nothing")] = 10.0
    stream_buffer_chars: Annotated[int, Flag("text kept for a client that reads slowly; beyond it is cut off")] = (
        1 << 20
    )
    write_timeout_s: Annotated[float, Flag("a client that reads nothing this long is cut off")] = 60.0
    tokenizer_threads: Annotated[int, Flag("threads that render and tokenise long prompts")] = 2
    prompt_cache_bytes: Annotated[
        int, Flag("memory for tokens and block keys of prompts seen before (0: no cache)")
    ] = 128 << 20
    written_calls_bytes: Annotated[
        int, Flag("memory for tool calls as models wrote them, used when they come back")
    ] = 32 << 20
    max_written_calls: Annotated[int, Flag("most tool calls kept for that")] = 100_000
    written_calls_ttl_s: Annotated[
        float, Flag("a kept tool call that nobody asks for is forgotten after this long")
    ] = 86_400.0
    head_priority: Annotated[
        int, Flag("priority of blocks with system prompts and tools, up to 100 (0: as that of all others)")
    ] = 50
    inline_prompt_bytes: Annotated[int, Flag("bodies up to this size are prepared on the event loop")] = 50_000

    def __post_init__(self) -> None:
        super().__post_init__()
        Aliases.parse(self.model_aliases)
        if not 0 <= self.http_port <= 65535:
            raise ValueError("http_port must be 0..65535")
        for name in (
            "max_body_bytes", "max_messages", "max_tools", "max_choices", "max_concurrent_requests", "max_models",
            "max_sessions", "session_bytes", "prefetch_s", "max_prefetches", "max_planned_prefetches", "max_tool_times",
            "session_timeout_s", "rest_timeout_s",
            "request_timeout_s", "body_timeout_s", "route_timeout_s", "generate_timeout_s", "heartbeat_timeout_s", "retry_pause_s",
            "response_ttl_s", "response_store_bytes", "response_store_entries", "max_stored_response_bytes",
            "response_events_bytes", "response_events_ttl_s", "max_websockets", "max_websocket_frames", "websocket_lifetime_s",
            "keep_alive_s", "stream_buffer_chars", "write_timeout_s", "tokenizer_threads", "absent_model_s", "body_total_timeout_s",
            "max_schema_bytes", "max_schema_depth", "compaction_max_tokens", "max_speculative_prefills",
            "speculative_prefill_tokens", "speculative_prefill_min_tokens", "speculative_prefill_s",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        for name in (
            "route_retries", "migration_limit", "inline_prompt_bytes", "prompt_cache_bytes", "written_calls_bytes",
            "session_prompt_bytes", "prefetch_lead_s", "prefetch_min_wait_s",
            "max_written_calls", "written_calls_ttl_s", "session_tools_bytes", "max_output_tokens",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        if not 0 <= self.head_priority <= 100:
            raise ValueError("head_priority must be 0..100")
        Stability.of(self)

    @property
    def api_keys(self) -> tuple[str, ...]:
        return tuple(key.strip() for key in self.api_key.split(",") if key.strip())
