"""A worker that is killed in the middle of a constrained answer: the next one goes on inside the same grammar."""

import json
from typing import Any

import jsonschema
import pytest

from kvbus_testkit.system import Answer, System
from tests.fault.system.test_killed_worker import QUESTION, busy_worker

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "words": {"type": "array", "items": {"enum": ["sea", "lamp", "storm"]}, "minItems": 20, "maxItems": 20},
        "end": {"type": "boolean"},
    },
    "required": ["words", "end"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "story", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "seeded"])
async def test_the_answer_is_valid_and_equals_the_undisturbed_one(
    tiny_system: System, sampling: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"messages": QUESTION, "max_tokens": 1500, "response_format": FORMAT, **sampling}
    undisturbed = await tiny_system.chat(**body)
    assert undisturbed.error is None
    assert undisturbed.finish_reason == "stop"
    jsonschema.validate(json.loads(undisturbed.text), SCHEMA)

    answer = Answer()
    killed = ""
    async for now in tiny_system.stream(body, answer):
        if now.chunks >= 20 and not killed:
            killed = await busy_worker(tiny_system)
            tiny_system.processes[killed].kill()

    assert killed
    assert answer.error is None
    assert answer.text == undisturbed.text
    assert (answer.finish_reason, answer.done) == ("stop", True)
    assert await tiny_system.metric("frontend", "kvbus_frontend_migrations_total") == 1
