"""`kvbus router explain`: where a request went and why, or where one would go now."""

import time
from collections.abc import Sequence
from typing import Annotated

from rich.console import Console

from kvbus_cli.asking import NotAnswered, ask_each, ask_one, run
from kvbus_cli.prompt.client import PromptFailed
from kvbus_cli.prompt.keys import KeyedPrompt, PromptSettings
from kvbus_cli.prompt.request_file import BadRequestFile
from kvbus_cli.router.tables import explanation_lines, explanation_table
from kvbus_cli.tool import failed, print_json, tool_settings
from kvbus_runtime.bus import Bus
from kvbus_runtime.settings import Flag
from kvbus_wire.request import SessionRef
from kvbus_wire.router import ExplainPlaced, ExplainRoute, RouteExplanation, RouteRequest

DEADLINE_S = 10.0


class ExplainSettings(PromptSettings, frozen=True, kw_only=True):
    """A placed request by its id, or a prompt in one of three forms."""

    request_id: Annotated[str, Flag("a request that was placed lately: the id of its response", metavar="ID")] = ""
    session: Annotated[str, Flag("session of the request", metavar="ID")] = ""
    tenant: Annotated[str, Flag("cache salt of the request: whose session it is", metavar="SALT")] = ""


def main(argv: Sequence[str]) -> int:
    settings = tool_settings(
        ExplainSettings,
        "router explain",
        "Show what each worker would take for a request, in seconds, and which one got it.",
        argv,
    )
    try:
        told = _placed(settings) if settings.request_id else _prompt(settings)
    except (BadRequestFile, NotAnswered, PromptFailed) as failure:
        return failed("router explain", failure)
    if settings.json:
        print_json(told)
        return 0
    console = Console(highlight=False)
    for line in explanation_lines(told):
        console.print(line, soft_wrap=True)
    console.print(explanation_table(told))
    return 0


def _placed(settings: ExplainSettings) -> RouteExplanation:
    """Only the router that placed the request knows why. Raise NotAnswered."""

    async def ask(bus: Bus) -> RouteExplanation:
        question = ExplainPlaced(request_id=settings.request_id)
        replies = await ask_each(bus, "router", bus.subjects.router_control, question, RouteExplanation)
        for reply in replies:
            if isinstance(reply.message, RouteExplanation):
                return reply.message
        problems = "\n".join(f"  {reply.instance_id}: {reply.problem}" for reply in replies)
        raise NotAnswered(f"no router can explain {settings.request_id}:\n{problems}")

    return run(settings, "router", ask)


def _prompt(settings: ExplainSettings) -> RouteExplanation:
    """Raise BadRequestFile, NotAnswered, PromptFailed."""
    request = route_request(settings.keyed(), settings.session, settings.tenant)

    async def ask(bus: Bus) -> RouteExplanation:
        question = ExplainRoute(request=request)
        told: RouteExplanation = await ask_one(bus, bus.subjects.routers_control, question, RouteExplanation)
        return told

    return run(settings, "router", ask)


def route_request(prompt: KeyedPrompt, session: str, tenant: str) -> RouteRequest:
    return RouteRequest(
        request_id="explain",
        model=prompt.model,
        keys=prompt.keys,
        prompt_tokens=prompt.tokens,
        max_tokens=1,
        deadline_ms=int((time.time() + DEADLINE_S) * 1000),
        session=SessionRef(id=session) if session else None,
        tenant=tenant,
    )
