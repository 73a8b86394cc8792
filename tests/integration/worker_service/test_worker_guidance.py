"""Guidance through the worker service, on a real bus."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

pytest.importorskip("torch")

from kvbus_testkit.nats import NatsServer
from kvbus_tokenizers import Tokenizer
from kvbus_wire.errors import ErrorCode
from kvbus_wire.guidance import Guidance
from kvbus_wire.request import MockOutput, Sampling
from kvbus_wire.worker import Accepted
from kvbus_worker.models import tiny
from tests.integration.worker_service.test_worker_service import TOKENIZER, _record, stage

PROMPT = list(range(30, 70))
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "n"],
    "additionalProperties": False,
}
JSON = Guidance(form="json_schema", text=json.dumps(SCHEMA), param="response_format")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("model") / "tiny")


def torch_worker(model: Path) -> dict[str, Any]:
    return {"engine": "torch", "model": str(model), "served_model_name": "mock", "kv_blocks": 64}


@pytest.mark.usefixtures("no_blocking")
async def test_a_worker_follows_guidance_and_goes_on_where_another_has_stopped(
    nats_server: NatsServer, namespace: str, model: Path
) -> None:
    tokenizer = Tokenizer((model / "tokenizer.json").read_bytes())
    async with stage(nats_server, namespace, **torch_worker(model)) as at:
        record = await _record(at.frontend)
        assert record.worker is not None
        assert record.worker.guidance
        greedy = Sampling(temperature=0.0)
        await at.frontend.send("w1", at.frontend.generate("whole", PROMPT, sampling=greedy, guidance=JSON))
        ended = await at.frontend.end_of("whole")
        whole = at.frontend.output["whole"]
        assert ended.reason == "stop"
        jsonschema.validate(json.loads(tokenizer.decode(whole)), SCHEMA)

        cut = len(whole) // 2
        at.frontend.output["moved"] = whole[:cut]
        moved = at.frontend.generate("moved", PROMPT + whole[:cut], resumed=cut, sampling=greedy, guidance=JSON)
        await at.frontend.send("w1", moved)
        await at.frontend.end_of("moved")
        assert at.frontend.output["moved"] == whole


@pytest.mark.usefixtures("no_blocking")
async def test_what_cannot_be_followed_ends_with_a_typed_error_and_nothing_else(
    nats_server: NatsServer, namespace: str, model: Path
) -> None:
    async with stage(nats_server, namespace, **torch_worker(model)) as at:
        broken = Guidance(form="json_schema", text='{"type":"objct"}', param="text.format")
        reply = await at.frontend.send("w1", at.frontend.generate("r", PROMPT, guidance=broken))
        assert isinstance(reply, Accepted)
        ended = await at.frontend.end_of("r")
        assert ended.error is not None
        assert (ended.error.code, ended.error.param) == (ErrorCode.INVALID_REQUEST, "text.format")
        assert not ended.error.retryable
        assert "r" not in at.frontend.cached
        assert at.metric("requests_open") == 0


async def test_the_mock_engine_says_that_it_has_no_guidance_and_plays_its_script(
    nats_server: NatsServer, namespace: str
) -> None:
    async with stage(nats_server, namespace) as at:
        record = await _record(at.frontend)
        assert record.worker is not None
        assert not record.worker.guidance
        said = MockOutput(output='{"kind": "cat", "n": 1}')
        prompt = TOKENIZER.encode("hi")
        await at.frontend.send("w1", at.frontend.generate("r", prompt, guidance=JSON, mock=said))
        await at.frontend.end_of("r")
        assert at.frontend.text("r") == said.output
