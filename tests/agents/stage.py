"""One scenario: a client in front of a system that plays a script, and what is noted of it for the report."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil

from tests.agents.client import RUN_TIMEOUT_S, Client, Outcome, Running, Site, base_environment, make_project
from tests.agents.exchange import Exchange, Usage
from tests.agents.model_formats import ModelFormat
from tests.agents.recorder import Recorder
from tests.agents.report import Row, Share
from tests.agents.system import MODEL, Line, System
from tests.agents.terminal import Terminal

OF_THE_PROMPT_BEFORE = 0.985
"""How much of the earlier prompt must be found when the next one begins with it: all but the last block, and what a template
writes at the end of a prompt only."""


class Stage:
    """What a test works with. `ask` runs the client for one user turn."""

    def __init__(self, client: Client, system: System, recorder: Recorder, folder: Path, logs: Path) -> None:
        self.client = client
        self.system = system
        self.recorder = recorder
        self._logs = logs
        self._runs: list[Running] = []
        self._shares: list[Share] = []
        project = make_project(folder / "project")
        self.site = Site(
            home=folder / "home",
            project=project,
            url=recorder.url,
            model=MODEL,
            context_length=system.context_length,
        )
        (self.site.home / "tmp").mkdir(parents=True)
        client.configure(self.site)

    @property
    def model(self) -> ModelFormat:
        """The format in which the script is to be written."""
        return self.system.model_format

    @property
    def project(self) -> Path:
        return self.site.project

    @property
    def generations(self) -> list[Exchange]:
        return self.recorder.generations

    def generations_of(self, text: str) -> list[Exchange]:
        """Of the requests so far that hold ``text``, a session's own: those for titles and memories offer fewer tools, or none."""
        found = [exchange for exchange in self.generations if exchange.in_prompt(text)]
        most = max((len(exchange.json.get("tools") or []) for exchange in found), default=0)
        return [exchange for exchange in found if len(exchange.json.get("tools") or []) == most]

    def play(self, *lines: Line) -> None:
        self.system.play(*lines)

    def start(
        self,
        prompt: str,
        *,
        resume: bool = False,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Running:
        """Start the client for one user turn, with more arguments and variables for this run."""
        command = [*self.client.command(self.site, prompt, resume=resume), *arguments]
        variables = {**base_environment(self.site), **self.client.environment(self.site), **(environment or {})}
        self._runs.append(Running(command, self.site, variables, self._logs / f"run-{len(self._runs) + 1}"))
        return self._runs[-1]

    def ask(
        self,
        prompt: str,
        *,
        resume: bool = False,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        timeout_s: float = RUN_TIMEOUT_S,
    ) -> Outcome:
        """Run the client for one user turn, to its end."""
        return self.start(prompt, resume=resume, arguments=arguments, environment=environment).wait(timeout_s)

    def terminal(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Terminal:
        """Start this command of the client in a terminal."""
        variables = {**base_environment(self.site), **self.client.environment(self.site), **(environment or {})}
        return Terminal(command, self.site, variables)

    def end(self) -> None:
        """End what a failed test has left running, and the servers that some clients leave behind for their next start."""
        for run in self._runs:
            run.kill()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("HOME") == str(self.site.home):
                    process.kill()

    def check_went_well(self, outcome: Outcome, answer: str) -> None:
        """It ended with this answer, and complained of nothing; nor did the server answer anything with an error."""
        said = f"{outcome}\n{self.summary()}"
        assert outcome.status == 0, said
        assert answer in self.client.answer(outcome), said
        assert self.client.complaints(outcome) == [], said
        assert [exchange.status for exchange in self.generations if exchange.status >= 400] == [], said

    def check_cached(self, exchange: Exchange, at_least: float, what: str, *, before: Exchange | None = None) -> None:
        """The share of the request's prompt that came from the cache; goes to the report.

        ``before``: a request whose whole prompt this one begins with. All of that must have been found (`OF_THE_PROMPT_BEFORE`).
        """
        usage = exchange.usage
        assert usage is not None, exchange
        reusable = None if before is None else _check_found_again(before, exchange, self.summary())
        self._shares.append(Share(what, usage.cached_share, at_least, reusable))
        assert usage.cached_share >= at_least, f"{what}: {usage}"

    def check_turns_cached(self, at_least: float = 0.97, *, exchanges: Sequence[Exchange] | None = None) -> None:
        """Each of these requests (all by default) found the one before it in the cache; the last one goes to the report.

        ``at_least``: of the request's own prompt. All of the prompt before it must be found in any case (`OF_THE_PROMPT_BEFORE`).
        """
        chosen = self.generations if exchanges is None else exchanges
        for before, exchange in pairwise(chosen[:-1]):
            _check_found_again(before, exchange, self.summary())
            assert exchange.usage is not None
            assert exchange.usage.cached_share >= at_least, f"{exchange.usage}\n{self.summary()}"
        self.check_cached(chosen[-1], at_least, "last turn", before=chosen[-2] if len(chosen) > 1 else None)

    def summary(self) -> str:
        """All requests, a line each, for messages of failed checks."""
        rows = []
        for exchange in self.recorder.exchanges:
            usage = exchange.usage if exchange.is_generation else None
            rows.append(f"{exchange.method} {exchange.path} {exchange.status} {usage or ''} {exchange.calls}")
        return "\n".join(rows)

    def row(self, scenario: str, outcome: str) -> Row:
        used: list[Usage] = [usage for exchange in self.generations if (usage := exchange.usage) is not None]
        shares = self._shares or ([Share("last request", used[-1].cached_share, None)] if used else [])
        return Row(
            client=f"{self.client.name} {self.client}",
            scenario=f"{scenario} ({self.model.name})",
            outcome=outcome,
            turns=len(self.generations),
            calls=sum(len(exchange.calls) for exchange in self.generations),
            prompt_tokens=used[-1].prompt_tokens if used else 0,
            shares=tuple(shares),
        )


def _check_found_again(before: Exchange, exchange: Exchange, summary: str) -> float:
    """The share of the request's prompt that it has in common with the one before it, which must have been found."""
    earlier, usage = before.usage, exchange.usage
    assert earlier is not None
    assert usage is not None
    assert usage.cached_tokens >= OF_THE_PROMPT_BEFORE * earlier.prompt_tokens, f"{usage}\n{summary}"
    return min(1.0, earlier.prompt_tokens / usage.prompt_tokens)
