"""All metrics of the worker, by name."""

from kvbus_runtime.metrics import Metrics
from kvbus_wire.frontend import Ended
from kvbus_worker.engines.base import EngineLoad

_REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class WorkerMetrics:
    """Names without the prefix ``kvbus_worker_``."""

    def __init__(self, metrics: Metrics) -> None:
        self.ended = metrics.counter("requests_ended", "requests by how they ended", ("reason",))
        self.refused = metrics.counter("requests_refused", "requests that were not accepted", ("code",))
        self.repeated = metrics.counter("requests_repeated", "Generate messages for a request that runs or has run")
        self.need_tokens = metrics.counter("requests_without_prefix", "requests whose prefix was not in G1 any more")
        self.tokens = metrics.counter("tokens", "tokens prefilled, decoded, found in G1, onboarded", ("kind",))
        self.request_s = metrics.histogram("request_seconds", "accepted to ended", (), _REQUEST_SECONDS)
        self.first_token_s = metrics.histogram("first_token_seconds", "accepted to the first token")
        self.open = metrics.gauge("requests_open", "requests accepted and not ended")
        self.recent = metrics.gauge("requests_remembered", "ids of ended requests that are remembered")
        self.running = metrics.gauge("requests_running", "requests that the engine computes")
        self.waiting = metrics.gauge("requests_waiting", "requests that wait in the engine or for their blocks")
        self.waiting_tokens = metrics.gauge("waiting_tokens", "prompt tokens still to compute")
        self.steps = metrics.counter("steps", "engine steps that produced something")
        self.decode_step_s = metrics.gauge("decode_step_seconds", "measured time of a decode step (moving average)")
        self.prefill_rate = metrics.gauge("prefill_tokens_per_second", "measured prefill rate (moving average)")
        self.blocks_used = metrics.gauge("blocks_used", "G1 blocks of running requests")
        self.blocks_cached = metrics.gauge("blocks_cached", "G1 blocks with a key")
        self.blocks_total = metrics.gauge("blocks_total", "G1 blocks")
        self.blocks_refused = metrics.gauge("token_store_refused", "blocks above the capacity of the token store")
        self.block_events = metrics.counter("block_events", "blocks stored and removed, times cleared", ("kind",))
        self.snapshots = metrics.gauge("snapshots_held", "block snapshots that are being read")
        self.kvbm_attached = metrics.gauge("kvbm_attached", "1 while a kvbm pool is mapped")
        self.kvbm_blocks = metrics.counter("kvbm_blocks", "blocks copied to and from kvbm", ("direction",))
        self.kvbm_bytes = metrics.counter("kvbm_bytes", "bytes copied to and from kvbm", ("direction",))
        self.kvbm_seconds = metrics.counter("kvbm_seconds", "time spent on copies to and from kvbm", ("direction",))
        self.kvbm_failures = metrics.counter(
            "kvbm_failures", "operations with kvbm that failed", ("operation", "reason")
        )
        self.kvbm_skipped = metrics.counter("kvbm_onboard_skipped", "onboardings not tried: too many at once")
        self.unpinned = metrics.counter("unpinned_blocks", "blocks that were to be pinned and are pinned nowhere")
        self.prefetches = metrics.counter("prefetches", "prompts brought into G1 ahead of their request", ("outcome",))
        self.prefetched = metrics.counter("prefetched_tokens", "tokens that prefetches brought")
        self.dropped = metrics.counter("dropped_blocks", "blocks freed because nobody needs them any more")
        self.offload_waiting = metrics.gauge("offload_queue_blocks", "blocks that wait for write-through")
        self.offload_dropped = metrics.gauge("offload_dropped_blocks", "blocks pushed out of the write-through queue")
        self.offload_evicted = metrics.gauge(
            "offload_evicted_blocks", "blocks that left G1 before they were written through"
        )

        self.remote_prefills = metrics.counter(
            "remote_prefills", "prompts computed for other workers, by outcome", ("outcome",)
        )
        self.remote_prefills_open = metrics.gauge("remote_prefills_open", "prompts being computed for other workers")
        self.staged_blocks = metrics.gauge("staged_blocks", "blocks that other workers can read now")
        self.transfer_leases = metrics.gauge("transfer_leases", "leases granted to other workers that have not ended")
        self.transfer_blocks = metrics.counter(
            "transfer_blocks", "blocks handed to and read from other workers", ("direction",)
        )
        self.transfer_bytes = metrics.counter("transfer_bytes", "bytes read from other workers", ("backend",))
        self.transfer_seconds = metrics.counter("transfer_seconds", "time spent on reading and importing these")
        self.pulls = metrics.counter(
            "remote_prefill_pulls", "prompts that others computed for this worker", ("outcome",)
        )
        self.pulls_open = metrics.gauge("remote_prefill_pulls_open", "prompts that others compute for this worker now")
        self.pull_waits = metrics.counter(
            "remote_prefill_shared", "requests that waited for blocks that come for another one"
        )

    def note_ended(self, ended: Ended, seconds: float) -> None:
        usage = ended.usage
        code = str(ended.error.code) if ended.error is not None else ended.reason
        self.ended.labels(code).inc()
        self.request_s.observe(seconds)
        self.tokens.labels("decode").inc(usage.output_tokens)
        self.tokens.labels("cached").inc(usage.cached_tokens)
        self.tokens.labels("onboarded").inc(usage.onboarded_tokens)
        if usage.output_tokens:
            self.tokens.labels("prefill").inc(max(usage.prompt_tokens - usage.cached_tokens, 0))

    def note_load(self, load: EngineLoad, not_submitted: int) -> None:
        self.running.set(load.running)
        self.waiting.set(load.waiting + not_submitted)
        self.waiting_tokens.set(load.waiting_tokens)
        self.decode_step_s.set(load.decode_step_s)
        self.prefill_rate.set(load.prefill_tokens_per_s)
        self.blocks_used.set(load.used_blocks)
        self.blocks_total.set(load.total_blocks)
