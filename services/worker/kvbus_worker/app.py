"""Composition root of the worker.

record says which model is loading -> engine loads -> model bundle into the object store -> subjects are served
-> record registered (work may come)
"""

import asyncio
import time
from contextlib import suppress
from pathlib import Path

from kvbus_blocks.keys import KEY_BYTES
from kvbus_runtime.discovery import Change
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.event_log import EventLog, KvEventPublisher
from kvbus_runtime.jetstream import JetStreamRefused
from kvbus_runtime.objects import ObjectStore
from kvbus_runtime.service import Service
from kvbus_runtime.settings import BadSettings
from kvbus_runtime.streams.sender import SenderLimits, StepSender
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.kvbm import AttachPool
from kvbus_wire.records import InstanceRecord, ModelCard, WorkerRecord
from kvbus_wire.worker import Generate, Prefetch
from kvbus_worker.adapters.engines import create_engine
from kvbus_worker.adapters.kvbm import Kvbm, KvbmLimits
from kvbus_worker.adapters.kvbm_link import KvbmLink
from kvbus_worker.adapters.load_reports import LoadReporter
from kvbus_worker.adapters.metrics import WorkerMetrics
from kvbus_worker.adapters.model_folder import ModelFolder, load_model_folder
from kvbus_worker.adapters.remote_prefill import PullLimits, RemotePrefiller
from kvbus_worker.adapters.transfer import TransferLink, TransferSettings
from kvbus_worker.core.admission import ModelLimits
from kvbus_worker.core.load_pacing import LoadPacing
from kvbus_worker.core.offload import OffloadQueue
from kvbus_worker.core.prefill_jobs import PrefillJobs
from kvbus_worker.core.requests import RequestTable
from kvbus_worker.core.roles import Role
from kvbus_worker.core.snapshots import Snapshots
from kvbus_worker.core.token_store import TokenStore
from kvbus_worker.engines.base import Engine, EngineError, EngineInfo, StepOutput
from kvbus_worker.handlers.control import CONTROL_MESSAGES, ControlHandler
from kvbus_worker.handlers.frontends import FrontendWatch
from kvbus_worker.handlers.generate import GenerateHandler
from kvbus_worker.handlers.prefetch import PrefetchHandler
from kvbus_worker.handlers.remote_prefill import TRANSFER_MESSAGES, PrefillLimits, RemotePrefillHandler
from kvbus_worker.handlers.runner import RequestRunner
from kvbus_worker.handlers.steps import StepHandler
from kvbus_worker.settings import WorkerSettings

_PREPARE_RETRY_S = 1.0
_ANNOUNCE_S = 2.0
_LAST_FRAMES_S = 2.0
_LAST_BLOCKS_S = 2.0


class WorkerApp:
    """The running worker. See `App` of the service host for the order of `drain` and `close`."""

    def __init__(self, service: Service, settings: WorkerSettings, engine: Engine, model: ModelFolder) -> None:
        info = engine.info
        name = settings.model_name
        self._service = service
        self._settings = settings
        self._engine = engine
        self._model = model
        self._metrics = WorkerMetrics(service.metrics)
        self._store = TokenStore(info.total_blocks, info.block_size)
        self._table = RequestTable(limit=settings.max_requests, recent_limit=settings.recent_requests)
        self._events = KvEventPublisher(service, name, "g1", info.block_size)
        self._sender = StepSender(
            service,
            heartbeat_s=settings.heartbeat_s,
            limits=SenderLimits(ring_frames=settings.replay_frames, ring_bytes=settings.replay_bytes),
        )
        self._reporter = self._make_reporter(name)
        self._kvbm = self._make_kvbm(info, name) if settings.kvbm and info.block_bytes else None
        self._role = Role(settings.role)
        limits = self._limits(name)
        self._transfer = self._make_transfer(info)
        self._prefills = self._make_prefills(self._transfer, limits) if self._transfer is not None else None
        self._remote = self._make_remote(self._transfer, limits) if self._transfer is not None else None
        self._runner = RequestRunner(
            engine,
            self._table,
            self._sender,
            changed=self._reporter.changed,
            metrics=self._metrics,
            log=service.log,
        )
        self._frontends = FrontendWatch(
            service.directory, self._runner, grace_s=settings.frontend_grace_s, log=service.log
        )
        self.on_step = StepHandler(
            self._runner,
            self._store,
            self._sender,
            self._events,
            self._kvbm,
            prefills=self._prefills,
            changed=self._reporter.changed,
            metrics=self._metrics,
            announces=settings.kv_events,
        )
        prefetch = PrefetchHandler(
            engine, self._store, limits, self._kvbm, parallel=settings.prefetch_parallel, metrics=self._metrics
        )
        self._generate = GenerateHandler(
            self._runner,
            self._store,
            limits,
            self._kvbm,
            prefetch=prefetch,
            remote=self._remote,
            incarnation=service.incarnation,
            spawn=service.spawn,
            metrics=self._metrics,
            log=service.log,
        )
        self._control: ControlHandler | None = None
        self._closed = False

    async def serve(self) -> None:
        """Serve, then register."""
        service, settings = self._service, self._settings
        control = self._control = ControlHandler(
            self._runner,
            self._store,
            Snapshots(
                limit=settings.snapshot_limit,
                ttl_s=settings.snapshot_ttl_s,
                chunk_blocks=settings.snapshot_chunk_blocks,
            ),
            self._sender,
            self._engine,
            kv_seq=lambda: self._events.last_seq,
            stop=service.stop,
            set_role=self.set_role,
            clock=time.monotonic,
            instance_id=service.instance_id,
            incarnation=service.incarnation,
            model=settings.model_name,
            metrics=self._metrics,
        )
        subjects = service.bus.subjects
        await service.bus.serve(
            subjects.generate(service.instance_id),
            (Generate, Prefetch),
            self._generate,
            max_pending=settings.max_generate_pending,
        )
        await service.bus.serve(subjects.control(service.instance_id), CONTROL_MESSAGES, control)
        if self._transfer is not None and self._prefills is not None:
            await self._transfer.start()
            self._prefills.role = self._role
            self._transfer.on_lease_end = self._prefills.on_lease_end
            self._metrics.transfer_leases.set_function(self._leases)
            await service.bus.serve(
                subjects.transfer(service.instance_id),
                TRANSFER_MESSAGES,
                self._prefills,
                max_pending=4 * settings.max_remote_prefills,
            )
        if self._kvbm is not None:
            self._kvbm.start()
        service.directory.on_change(self._greet)
        service.spawn(self._reporter.run(), name="load reports")
        await service.register(worker=self.record)
        service.health.set("engine", True, self._engine.info.name)

    async def set_role(self, role: Role) -> None:
        """What runs goes on; routers see it when their directory does."""
        self._role = role
        if self._prefills is not None:
            self._prefills.role = role
        await self._service.register(worker=self.record)
        self._reporter.changed()
        self._service.log.info("role_set", role=str(role))

    def _leases(self) -> float:
        return float(self._transfer.leases) if self._transfer is not None else 0.0

    def _greet(self, record: InstanceRecord, change: Change) -> None:
        """A router that starts knows nothing of the load."""
        if record.service == "router" and change == "joined":
            self._reporter.changed()

    async def drain(self, reason: str) -> None:
        self._generate.draining = True
        if self._prefills is not None:
            self._prefills.draining = True
        self._reporter.changed()
        try:
            await self._runner.wait_idle()
            if self._prefills is not None:
                await self._prefills.wait_idle()
            if self._kvbm is not None:
                await self._kvbm.settle(_LAST_BLOCKS_S)
        except asyncio.CancelledError:
            message = f"the worker goes away: {reason}"
            self._runner.end_all_now(ErrorReply(code=ErrorCode.DRAINING, message=message, retryable=True))
            raise

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._service.health.set("engine", False, "closed")
        self._frontends.close()
        if self._control is not None:
            self._control.close()
        if self._prefills is not None:
            self._prefills.close()
        if self._transfer is not None:
            await self._transfer.close()
        if self._kvbm is not None:
            self._kvbm.close()
        await self._engine.stop()
        self._runner.close()
        with suppress(TimeoutError):  # a crash may have taken the task that sends
            async with asyncio.timeout(_LAST_FRAMES_S):
                await self._sender.close()
        await self._events.close()

    def _make_reporter(self, model: str) -> LoadReporter:
        service, settings = self._service, self._settings
        return LoadReporter(
            service.bus,
            self._engine,
            self._table,
            LoadPacing(
                min_interval_s=settings.load_min_interval_s,
                idle_interval_s=settings.load_idle_interval_s,
            ),
            instance_id=service.instance_id,
            incarnation=service.incarnation,
            model=model,
            kv_seq=lambda: self._events.last_seq,
            is_draining=lambda: self._generate.draining,
            onboard_rates=self._onboard_rates,
            prefill_ids=lambda: self._prefills.jobs.request_ids if self._prefills is not None else (),
            handover_s=lambda: self._remote.handover_s if self._remote is not None else 0.0,
            metrics=self._metrics,
        )

    def _onboard_rates(self) -> dict[str, float]:
        rates = dict(self._kvbm.rates.tokens_per_s) if self._kvbm is not None else {}
        return rates | self._remote.rates if self._remote is not None else rates

    def _limits(self, name: str) -> ModelLimits:
        info = self._engine.info
        return ModelLimits(
            name=name,
            fingerprint=self._model.fingerprint,
            kv_layout=info.kv_layout,
            block_size=info.block_size,
            context_length=info.context_length,
            vocab_size=self._model.vocab_size,
            engine=info.name,
            guidance=info.guidance,
            max_retention_ranges=self._settings.max_retention_ranges,
        )

    def _make_transfer(self, info: EngineInfo) -> TransferLink | None:
        service, settings = self._service, self._settings
        if not settings.transfer or not (info.block_bytes or info.handover):
            return None
        return TransferLink(
            service.instance_id,
            TransferSettings.of(settings),
            block_bytes=info.block_bytes,
            layout=info.kv_layout,
            log=service.log,
        )

    def _make_prefills(self, transfer: TransferLink, limits: ModelLimits) -> RemotePrefillHandler:
        service, settings = self._service, self._settings
        return RemotePrefillHandler(
            self._engine,
            self._store,
            PrefillJobs(limit=settings.max_remote_prefills, slots=transfer.slots),
            transfer,
            limits,
            PrefillLimits.of(settings),
            self._kvbm,
            incarnation=service.incarnation,
            spawn=service.spawn,
            changed=self._reporter.changed,
            metrics=self._metrics,
            log=service.log,
        )

    def _make_remote(self, transfer: TransferLink, limits: ModelLimits) -> RemotePrefiller:
        service = self._service
        return RemotePrefiller(
            service.bus,
            self._engine,
            transfer,
            limits,
            PullLimits.of(self._settings),
            instance_id=service.instance_id,
            spawn=service.spawn,
            metrics=self._metrics,
            log=service.log,
        )

    def _make_kvbm(self, info: EngineInfo, model: str) -> Kvbm:
        service, settings = self._service, self._settings
        request = AttachPool(
            instance_id=service.instance_id,
            incarnation=service.incarnation,
            model=model,
            kv_layout=info.kv_layout,
            block_bytes=info.block_bytes,
            block_size=info.block_size,
        )
        link = KvbmLink(
            service.bus,
            service.directory,
            request,
            host_id=service.host_id,
            timeout_s=settings.kvbm_timeout_s,
            retry_s=settings.kvbm_retry_s,
            metrics=self._metrics,
            log=service.log,
        )
        fitting = max(settings.offload_batch_bytes // info.block_bytes, 1)
        return Kvbm(
            link,
            self._engine,
            self._store,
            OffloadQueue(
                limit_blocks=settings.offload_queue_blocks, batch_blocks=min(settings.offload_batch_blocks, fitting)
            ),
            KvbmLimits(
                onboard_timeout_s=settings.onboard_timeout_s,
                onboard_batch_blocks=settings.onboard_batch_blocks,
                onboard_batch_bytes=settings.onboard_batch_bytes,
                onboard_min_blocks=settings.onboard_min_blocks,
                onboard_max_blocks=settings.onboard_max_blocks,
                onboard_parallel=settings.onboard_parallel,
                onboard_probe_s=settings.onboard_probe_s,
                offload_gather_s=settings.offload_gather_s,
                offload_repair_s=settings.offload_repair_s,
                max_keys=min((service.bus.max_payload // 2) // KEY_BYTES, settings.onboard_max_blocks),
            ),
            spawn=service.spawn,
            metrics=self._metrics,
        )

    @property
    def record(self) -> WorkerRecord:
        info, settings = self._engine.info, self._settings
        return WorkerRecord(
            model=ModelCard(
                name=settings.model_name,
                fingerprint=self._model.fingerprint,
                block_size=info.block_size,
                context_length=info.context_length,
                bundle=self._model.bundle_name,
                kv_layout=info.kv_layout,
                eos_token_ids=self._model.eos_token_ids,
                created_s=int(time.time()),
                tool_call_parser=settings.tool_call_parser,
                reasoning_parser=settings.reasoning_parser,
            ),
            engine=info.name,
            total_blocks=info.total_blocks,
            block_bytes=info.block_bytes,
            max_num_seqs=info.max_num_seqs,
            max_batched_tokens=info.max_batched_tokens,
            prefill_tokens_per_s=info.prefill_tokens_per_s,
            decode_step_s=info.decode_step_s,
            role=str(self._role),
            guidance=info.guidance,
            taints=settings.taint_names,
            kv_events=info.kv_events and settings.kv_events,
            transfers=self._transfer.names if self._transfer is not None else (),
            handover=info.handover,
        )


async def start(service: Service, settings: WorkerSettings) -> WorkerApp:
    """Load the engine, publish the model bundle, serve, register. Raise BadSettings for what a person has to correct."""
    service.health.set("engine", False, "loading")
    began = time.monotonic()
    app: WorkerApp | None = None

    def sink(output: StepOutput) -> None:
        if app is not None:
            app.on_step(output)

    await _announce(service, settings.model_name)
    try:
        directory = Path(settings.model) if settings.model else None
        model = await asyncio.to_thread(load_model_folder, directory)
        engine = await asyncio.to_thread(create_engine, settings, model)
        await engine.start(sink)
    except EngineError as error:
        if error.reply.code in (ErrorCode.INVALID_REQUEST, ErrorCode.UNSUPPORTED):
            raise BadSettings(f"{error.reply.message}") from error
        raise
    try:
        await _prepare_bus(service, model)
        app = WorkerApp(service, settings, engine, model)
        await app.serve()
    except BaseException:
        await engine.stop()
        raise
    info = engine.info
    service.log.info(
        "engine_loaded",
        engine=info.name,
        model=settings.model_name,
        fingerprint=model.fingerprint,
        blocks=info.total_blocks,
        block_size=info.block_size,
        block_bytes=info.block_bytes,
        context_length=info.context_length,
        seconds=round(time.monotonic() - began, 3),
    )
    return app


async def _announce(service: Service, model: str) -> None:
    """Frontends tell clients to wait for a model that is loading. Not under an id that another process may still serve with: it
    goes on until this one can take over. Nor for long: the bus may be away."""
    if service.directory.get(service.instance_id) is not None:
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(_ANNOUNCE_S):
            await service.register(loading=model)


async def _prepare_bus(service: Service, model: ModelFolder) -> None:
    """Make the KV event stream, and publish the bundle that frontends need; waits for a bus that can."""
    objects = ObjectStore(service.bus)
    while True:
        try:
            await EventLog.open(service.bus)
            await objects.put(model.bundle_name, model.packed, keep=True)
        except (RequestFailed, JetStreamRefused) as failure:
            service.log.warning("bus_not_prepared", reason=str(failure))
            await asyncio.sleep(_PREPARE_RETRY_S)
        else:
            return
