"""`kvbus router explain`: where a request went and why, or where one would go now."""

import time
from collections.abc import Sequence
from typing import Annotated

from kvbus_cli.asking import NotAnswered, ask_each, ask_one, run
from kvbus_cli.prompt.client import PromptFailed
from kvbus_cli.prompt.keys import PromptSettings, keyed_prompt
from kvbus_cli.prompt.request_file import BadRequestFile
from kvbus_cli.router.question import generation_of, route_request
from kvbus_cli.router.tables import explanation_lines, explanation_table
from kvbus_cli.tables import print_table
from kvbus_cli.tool import BAD_USAGE, failed, print_json, tool_settings
from kvbus_runtime.bus import Bus
from kvbus_runtime.settings import Flag
from kvbus_wire.router import ExplainPlaced, ExplainRoute, RouteExplanation

DEADLINE_S = 10.0
NOBODY = 3
"""Exit status: no worker could take the request."""


class ExplainSettings(PromptSettings, frozen=True, kw_only=True):
    """A placed request by its id, or a prompt in one of three forms."""

    request_id: Annotated[str, Flag("a request that was placed lately: the id of its response", metavar="ID")] = ""
    session: Annotated[str, Flag("session of the request: the header x-dynamo-session-id", metavar="ID")] = ""

    @property
    def headers(self) -> dict[str, str]:
        session = {"X-Dynamo-Session-Id": self.session} if self.session else {}
        return super().headers | session


def main(argv: Sequence[str]) -> int:
    settings = tool_settings(
        ExplainSettings,
        "router explain",
        "Show what each worker would take for a request, in seconds, and which one got it; or, for a prompt, what it would be "
        f"now with the hints of the body and the headers. The exit status is {NOBODY} when no worker could take it.",
        argv,
    )
    prompts = [flag for flag in ("text", "tokens", "messages") if getattr(settings, flag)]
    if bool(settings.request_id) == bool(prompts):
        return failed("router explain", "give --request-id, or one of --text, --tokens and --messages", BAD_USAGE)
    try:
        told = _placed(settings) if settings.request_id else _prompt(settings)
    except BadRequestFile as failure:
        return failed("router explain", failure, BAD_USAGE)
    except (NotAnswered, PromptFailed) as failure:
        return failed("router explain", failure)
    if settings.json:
        print_json(told)
    else:
        print_table(explanation_table(told), *explanation_lines(told))
    return 0 if could_go(told) else NOBODY


def could_go(told: RouteExplanation) -> bool:
    return bool(told.worker_id) or any(not terms.verdict for terms in told.workers)


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
    given, headers = settings.request, settings.headers
    prompt = keyed_prompt(settings.url, given, headers)
    request = route_request(prompt, generation_of(given, headers), int((time.time() + DEADLINE_S) * 1000))

    async def ask(bus: Bus) -> RouteExplanation:
        question = ExplainRoute(request=request)
        told: RouteExplanation = await ask_one(bus, bus.subjects.routers_control, question, RouteExplanation)
        return told

    return run(settings, "router", ask)
