"""The whole system with the mock engine, and the script that it plays."""

import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kvbus_testkit.up import KvbusUp
from tests.agents.model_formats import CONTEXT_LENGTH, ModelFormat

MODEL = "local-model"
Line = dict[str, Any]


def line(match: str | Sequence[str], output: str = "", **fields: Any) -> Line:
    """A line of a script: what the model says when ``match`` stands last in the prompt."""
    return {"match": match, **({"output": output} if output else {}), **fields}


class System:
    """A running `kvbus up` with one worker; a context manager. Tests share it and take turns in writing its script."""

    def __init__(
        self,
        folder: Path,
        model_format: ModelFormat,
        settings: Sequence[str] = (),
        context_length: int = CONTEXT_LENGTH,
    ) -> None:
        self.model_format = model_format
        self.context_length = context_length
        self._script = folder / "script.jsonl"
        self._script.write_text("")
        model = model_format.write_model(folder / "model", context_length)
        self._up = KvbusUp(
            folder,
            *("--engine", "mock", "--workers", "1", "--model", str(model), "--served-model-name", MODEL),
            *("--tool-call-parser", model_format.tool_parser, "--reasoning-parser", model_format.reasoning_parser),
            *("--mock-speedup", "200", "--kv-blocks", str(131_072), "--set", f"worker.script={self._script}"),
            *(word for setting in settings for word in ("--set", setting)),
        )

    @property
    def url(self) -> str:
        return self._up.url

    @property
    def output(self) -> str:
        return self._up.output

    def play(self, *lines: Line) -> None:
        """Start a new script."""
        new = self._script.with_suffix(".new")
        new.write_text("".join(json.dumps(item) + "\n" for item in lines))
        new.replace(self._script)

    def worker_metric(self, name: str) -> float:
        """The value of a metric of the worker that has no labels."""
        ready_url = self._up.processes("worker")[0].ready_url
        return _metric(ready_url.rpartition("/")[0] + "/metrics", name)

    def __enter__(self) -> "System":
        self._up.wait_ready(60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._up.__exit__(kind, error, trace)


def _metric(url: str, name: str) -> float:
    with urllib.request.urlopen(url, timeout=10) as response:  # noqa: S310
        text: str = response.read().decode()
    return next(float(row.rpartition(" ")[2]) for row in text.splitlines() if row.startswith(f"{name} "))
