"""A whole kvbus as child processes of a test, each under the test's control: nats-server, all services, and an HTTP client."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from kvbus_testkit.nats import NatsServer
from kvbus_testkit.processes import ServiceProcess
from kvbus_testkit.timing import scaled


class Answer(msgspec.Struct):
    """What a streamed answer has brought so far. ``error`` is the error body when it ended with one."""

    text: str = ""
    chunks: int = 0
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False

    @property
    def cached_tokens(self) -> int:
        assert self.usage is not None, "no usage"
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


class System:
    """An async context manager. Workers are named ``worker-0``, ``worker-1``, ..; ``flags`` maps a service, or one of its
    instances, to more arguments, for what is started from then on. ``nats_of``: an instance that reaches the bus in another way
    than by its URL."""

    def __init__(
        self,
        worker_flags: Sequence[str],
        *,
        workers: int = 2,
        flags: Mapping[str, Sequence[str]] | None = None,
        namespace: str = "system",
    ) -> None:
        self.flags: dict[str, tuple[str, ...]] = {name: tuple(some) for name, some in (flags or {}).items()}
        self.flags["worker"] = tuple(worker_flags)
        self._worker_count = workers
        self.nats_of: dict[str, str] = {}
        self._namespace = namespace
        self._stack = ExitStack()
        self._nats: NatsServer | None = None
        self._http: aiohttp.ClientSession | None = None
        self.processes: dict[str, ServiceProcess] = {}
        self.url = ""
        self.model = ""

    @property
    def nats(self) -> NatsServer:
        assert self._nats is not None, "the system is not started"
        return self._nats

    @property
    def http(self) -> aiohttp.ClientSession:
        assert self._http is not None, "the system is not started"
        return self._http

    @property
    def workers(self) -> list[str]:
        return [name for name in self.processes if name.startswith("worker")]

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            self._print_logs()
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._print_logs()
        await self._stop()

    async def _start(self) -> None:
        self._nats = self._stack.enter_context(NatsServer())
        await self.prepare()
        for service in ("indexer", "kvbm", "router", "frontend"):
            self.start(service)
        for number in range(self._worker_count):
            self.start(f"worker-{number}")
        self.url = str(self.processes["frontend"].wait_for_event("http_listens", timeout_s=30)["url"])
        self._http = aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(total=scaled(120)))
        await self.until_ready()
        self.model = (await self.get("/v1/models"))["data"][0]["id"]

    async def prepare(self) -> None:
        """The bus is there, and nothing else."""

    async def _stop(self) -> None:
        if self._http is not None:
            await self._http.close()
        for process in self.processes.values():
            if process.returncode is None:
                process.terminate()
        self._stack.close()

    def _print_logs(self) -> None:
        for name, process in self.processes.items():
            print(f"--- {name} (exit status {process.returncode})\n{process.log_text()[-6000:]}")  # noqa: T201

    def start(self, name: str) -> ServiceProcess:
        """Start a service (again) under its name; what ran under that name before must have ended."""
        service = name.partition("-")[0]
        own = ("--http-port", "0") if service == "frontend" else ()
        arguments = (
            *("--nats", self.nats_of.get(name, self.nats.url), "--namespace", self._namespace, "--instance-id", name),
            *("--drain-timeout-s", "5"),
            *own,
            *self.flags.get(service, ()),
            *(self.flags.get(name, ()) if name != service else ()),
        )
        process = self._stack.enter_context(ServiceProcess(f"kvbus_{service}", arguments))
        self.processes[name] = process
        return process

    async def until_ready(self, *, timeout_s: float = 90.0) -> None:
        """Until every service that runs says that it can serve."""
        for process in self.processes.values():
            await asyncio.to_thread(process.wait_ready, timeout_s=timeout_s)

    async def metric(self, name: str, metric: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels at a service."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        url = self.processes[name].wait_for_event("started")["health"]
        async with self.http.get(f"{url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.split("{")[0].split(" ")[0] == metric and all(label in line for label in wanted)
        )

    async def get(self, path: str) -> Any:
        async with self.http.get(path) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        async with self.http.post(path, json=body) as response:
            return response.status, await response.json()

    async def stream(self, body: Mapping[str, Any], answer: Answer | None = None) -> AsyncIterator[Answer]:
        """Yield the growing answer of a streamed chat completion after every event."""
        answer = answer if answer is not None else Answer()
        full = {"stream": True, "stream_options": {"include_usage": True}, "model": self.model, **body}
        async with self.http.post("/v1/chat/completions", json=full) as response:
            if response.status != 200:
                answer.error = {"status": response.status, **(await response.json())["error"]}
                yield answer
                return
            async for line in response.content:
                if line.startswith(b"data: "):
                    _apply(answer, line[len(b"data: ") :].strip())
                    yield answer

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Answer:
        """A streamed chat completion, greedy unless ``options`` say otherwise, read to its end."""
        answer = Answer()
        async for _ in self.stream({"messages": list(messages), "temperature": 0, **options}, answer):
            pass
        return answer


def _apply(answer: Answer, data: bytes) -> None:
    if data == b"[DONE]":
        assert not answer.done, "[DONE] came twice"
        answer.done = True
        return
    event = json.loads(data)
    if "error" in event:
        assert answer.error is None, "two errors"
        answer.error = event["error"]
        return
    if event.get("usage"):
        answer.usage = event["usage"]
    for choice in event["choices"]:
        answer.chunks += 1
        answer.text += choice["delta"].get("content") or ""
        if choice.get("finish_reason"):
            assert answer.finish_reason is None, "two finish reasons"
            answer.finish_reason = choice["finish_reason"]
