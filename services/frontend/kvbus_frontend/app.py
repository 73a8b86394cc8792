"""The frontend's composition root."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from aiohttp import web

from kvbus_frontend.adapters.generation import Generator
from kvbus_frontend.adapters.http_server import HttpServer
from kvbus_frontend.adapters.models import Models
from kvbus_frontend.adapters.prefetcher import Prefetcher
from kvbus_frontend.adapters.response_store import ResponseStore, cluster_sealer
from kvbus_frontend.adapters.session_blocks import SessionBlocks
from kvbus_frontend.adapters.session_keeper import SessionKeeper
from kvbus_frontend.adapters.speculation import Speculator
from kvbus_frontend.core.sessions import Sessions
from kvbus_frontend.handlers.api import Api
from kvbus_frontend.handlers.chat import ChatHandler
from kvbus_frontend.handlers.chat_flow import ChatFlow
from kvbus_frontend.handlers.completions import CompletionsHandler
from kvbus_frontend.handlers.frontend_control import FrontendControl
from kvbus_frontend.handlers.messages import MessagesHandler, hello
from kvbus_frontend.handlers.models import ModelsHandler
from kvbus_frontend.handlers.prefetch import PrefetchHandler
from kvbus_frontend.handlers.prompt import AskedReader, BodyReader, PromptHandler, ResponsesReader
from kvbus_frontend.handlers.responses import ResponsesHandler
from kvbus_frontend.handlers.responses_background import BackgroundResponses
from kvbus_frontend.handlers.responses_compaction import CompactionHandler
from kvbus_frontend.handlers.responses_flow import ResponsesFlow
from kvbus_frontend.handlers.responses_socket import SocketHandler
from kvbus_frontend.handlers.sessions import SessionsHandler
from kvbus_frontend.handlers.tokenization import TokenizationHandler
from kvbus_frontend.settings import FrontendSettings
from kvbus_protocols.prompt_view import PromptApi
from kvbus_runtime.objects import ObjectStore
from kvbus_runtime.service import Service
from kvbus_runtime.streams.receiver import StepReceiver

ENDED_S = 2.0
"""After the drain deadline: time to write the terminal errors to the clients."""


class Frontend:
    """``url``: of the HTTP API."""

    def __init__(
        self,
        server: HttpServer,
        sockets: SocketHandler,
        api: Api,
        models: Models,
        generator: Generator,
        receiver: StepReceiver,
        executor: ThreadPoolExecutor,
        keeper: SessionKeeper,
    ) -> None:
        self._server = server
        self._sockets = sockets
        self._api = api
        self._models = models
        self._generator = generator
        self._receiver = receiver
        self._executor = executor
        self._keeper = keeper

    @property
    def url(self) -> str:
        return self._server.url

    async def drain(self, reason: str) -> None:
        self._api.admission.draining = True
        self._api.speculator.stop()
        self._keeper.stop()
        try:
            await self._api.wait_idle()
        except asyncio.CancelledError:
            self._api.end_all(reason)
            with suppress(TimeoutError):  # of clients that read nothing: `close` cuts them off
                async with asyncio.timeout(ENDED_S):
                    await self._api.wait_idle()
            raise

    async def close(self) -> None:
        await self._sockets.close()
        await self._server.stop()
        await self._generator.settle()
        await self._keeper.settle()
        await self._receiver.close()
        self._models.close()
        self._executor.shutdown(wait=False, cancel_futures=True)


async def start_frontend(service: Service, settings: FrontendSettings) -> Frontend:
    executor = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")
    receiver = StepReceiver(service, heartbeat_timeout_s=settings.heartbeat_timeout_s)
    await receiver.start()
    generator = Generator(
        service.bus, receiver, service.instance_id, settings, service.metrics, service.log, service.spawn
    )
    models = Models(
        service.directory,
        ObjectStore(service.bus),
        settings,
        executor,
        service.health,
        service.metrics,
        service.log,
        service.spawn,
    )
    keeper = _session_keeper(service, settings, models)
    generator.on_rest = keeper.hear_rest
    speculator = Speculator(generator, executor, settings, service.metrics, service.log, service.spawn, keeper)
    api = Api(settings, models, generator, speculator, keeper, executor, service.metrics, service.log)
    flow = ChatFlow(api)
    responses = await _responses_flow(service, settings, api, flow)
    background = BackgroundResponses(api, responses, service)
    sockets = SocketHandler(api, responses, service.metrics)
    readers = _readers(settings, api, flow, responses)
    sessions = SessionsHandler(keeper, settings)
    completions = CompletionsHandler(api) if settings.enable_openai_api else None
    prefetch = PrefetchHandler(api, keeper, sessions, readers, completions)
    control = FrontendControl(background.cancel_here, sessions, prefetch, keeper)
    await control.start(service.bus, service.instance_id)
    service.spawn(keeper.run(), name="prefetch")
    routes = [*_routes(settings, api, flow, models, readers), *_session_routes(sessions, prefetch)]
    if settings.enable_openai_api:
        routes += _responses_routes(api, responses, background, sockets)
    server = HttpServer(
        routes,
        [*service.health.routes(), web.get("/", hello), web.get("/api/hello", hello)],
        host=settings.http_host,
        port=settings.http_port,
        api_keys=settings.api_keys,
        metrics=service.metrics,
        log=service.log,
    )
    models.start()
    await server.start()
    service.log.info("http_listens", url=server.url)
    await service.register()
    return Frontend(server, sockets, api, models, generator, receiver, executor, keeper)


async def _responses_flow(service: Service, settings: FrontendSettings, api: Api, flow: ChatFlow) -> ResponsesFlow:
    store = ResponseStore(service.bus, settings, service.metrics, service.log)
    sealer = await cluster_sealer(service.bus, settings.response_seal_key)
    return ResponsesFlow(api, flow, store, sealer, service.metrics)


def _responses_routes(
    api: Api, flow: ResponsesFlow, background: BackgroundResponses, sockets: SocketHandler
) -> list[web.RouteDef]:
    responses, compaction = ResponsesHandler(api, flow, background), CompactionHandler(api, flow)
    return [
        web.post("/v1/responses", responses.post),
        web.get("/v1/responses", sockets.get),
        web.post("/v1/responses/compact", compaction.post),
        web.post("/v1/responses/input_tokens", responses.input_tokens),
        web.get("/v1/responses/{id}", responses.get),
        web.delete("/v1/responses/{id}", responses.delete),
        web.post("/v1/responses/{id}/cancel", responses.cancel),
        web.get("/v1/responses/{id}/input_items", responses.input_items),
    ]


def _session_keeper(service: Service, settings: FrontendSettings, models: Models) -> SessionKeeper:
    sessions = Sessions(limit=settings.max_sessions, limit_bytes=settings.session_bytes)
    blocks = SessionBlocks(
        service.bus, service.directory, service.instance_id, sessions.held, settings, service.metrics, service.log
    )

    def allowed(name: str) -> tuple[str, ...]:
        model = models.get(name)
        return model.offer.allowed if model is not None else ()

    prefetcher = Prefetcher(service.bus, settings, allowed, service.metrics)
    return SessionKeeper(sessions, blocks, prefetcher, settings, service.metrics, service.log, service.spawn)


def _session_routes(sessions: SessionsHandler, prefetch: PrefetchHandler) -> list[web.RouteDef]:
    return [
        web.get("/v1/sessions", sessions.listed),
        web.get("/v1/sessions/{id}", sessions.get),
        web.delete("/v1/sessions/{id}", sessions.delete),
        web.post("/v1/kv/prefetch", prefetch.post),
    ]


def _readers(
    settings: FrontendSettings, api: Api, flow: ChatFlow, responses: ResponsesFlow
) -> dict[PromptApi, AskedReader]:
    """Of the requests whose prompts can be asked about."""
    readers: dict[PromptApi, AskedReader] = {}
    if settings.enable_openai_api:
        readers["chat"] = BodyReader(flow, ChatHandler(api, flow).conversation, ("messages", "tools", "tool_choice"))
        readers["responses"] = ResponsesReader(responses)
    if settings.enable_anthropic_api:
        members = ("system", "messages", "tools", "tool_choice")
        readers["messages"] = BodyReader(flow, MessagesHandler(api, flow).conversation, members)
    return readers


def _routes(
    settings: FrontendSettings,
    api: Api,
    flow: ChatFlow,
    models: Models,
    readers: dict[PromptApi, AskedReader],
) -> list[web.RouteDef]:
    listed, tokenization = ModelsHandler(models, settings.max_output_tokens), TokenizationHandler(api)
    routes = [
        web.get("/v1/models", listed.list),
        web.get("/v1/models/{id:.+}", listed.get),
        web.post("/v1/tokenize", tokenization.tokenize),
        web.post("/v1/detokenize", tokenization.detokenize),
    ]
    if settings.enable_openai_api:
        chat, completions = ChatHandler(api, flow), CompletionsHandler(api)
        routes += [
            web.post("/v1/chat/completions", chat.post),
            web.post("/v1/completions", completions.post),
        ]
    if settings.enable_anthropic_api:
        messages = MessagesHandler(api, flow)
        routes += [
            web.post("/v1/messages", messages.post),
            web.post("/v1/messages/count_tokens", messages.count_tokens),
        ]
    return [*routes, web.post("/v1/prompt", PromptHandler(api, readers).post)]
