"""Models appear and disappear with their workers; tokenize and detokenize."""

import gc
import weakref
from typing import Any

import pytest

from kvbus_runtime.objects import ObjectStore
from kvbus_testkit.timing import eventually
from kvbus_tokenizers import ModelBundle, bundle_name, byte_level_bundle, pack_bundle

WITH_EFFORT = (
    b"{% if reasoning_effort in ('low', 'max') %}{{ reasoning_effort }}{% endif %}"
    b"{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
)


async def listed(cluster: Any) -> list[str]:
    async with cluster.session.get("/v1/models") as response:
        assert response.status == 200
        return [model["id"] for model in (await response.json())["data"]]


async def test_a_model_is_described_as_the_api_says(cluster: Any) -> None:
    await cluster.start(card={"name": "org/model-1.5", "reasoning_parser": "qwen3", "tool_call_parser": "none"})
    async with cluster.session.get("/v1/models") as response:
        body = await response.json()
    model = {
        "id": "org/model-1.5",
        "object": "model",
        "created": 1,
        "owned_by": "kvbus",
        "root": "org/model-1.5",
        "max_model_len": 512,
        "context_length": 512,
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "top_provider": {"context_length": 512, "max_completion_tokens": 512},
        "supported_parameters": [
            "max_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
            "stop", "seed", "logit_bias", "logprobs", "top_logprobs", "reasoning",
        ],
        "kvbus": {"reasoning_parser": "qwen3"},
    }  # fmt: skip
    assert body == {"object": "list", "data": [model]}
    async with cluster.session.get("/v1/models/org/model-1.5") as response:
        assert await response.json() == model
    async with cluster.session.get("/v1/models/other") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "model_not_found"


async def test_both_dialects_say_the_same_of_a_model(cluster: Any) -> None:
    bundle = ModelBundle({**byte_level_bundle().files, "chat_template.jinja": WITH_EFFORT})
    card = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    await cluster.start(bundle=bundle, card=card, max_output_tokens=100)
    async with cluster.session.get("/v1/models/m") as response:
        model = await response.json()
    assert model["top_provider"] == {"context_length": 512, "max_completion_tokens": 100}
    assert {"tools", "reasoning", "reasoning_effort"} <= set(model["supported_parameters"])
    assert model["kvbus"] == {
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
        "reasoning_efforts": ["low", "max"],
    }
    async with cluster.session.get("/v1/models/m", headers={"anthropic-version": "2023-06-01"}) as response:
        same = await response.json()
    assert (same["max_input_tokens"], same["max_tokens"]) == (512, 100)
    effort, thinking = same["capabilities"]["effort"], same["capabilities"]["thinking"]
    assert [level for level in effort if effort["supported"] and effort[level] == {"supported": True}] == ["low", "max"]
    assert (thinking["supported"], thinking["types"]["adaptive"]) == (True, {"supported": True})
    _, answer = await cluster.chat("hi", max_tokens=1000)
    assert cluster.worker.requests[0].stopping.max_tokens == 100, answer


async def test_models_come_and_go_with_their_workers(cluster: Any) -> None:
    await cluster.start()
    second = await cluster.add_worker("w2", name="m2")
    await eventually(lambda: cluster.frontend.app._api.models.get("m2"))
    assert await listed(cluster) == ["m", "m2"]
    second.service.stop("test")
    await eventually(lambda: cluster.frontend.app._api.models.get("m2") is None)
    assert await listed(cluster) == ["m"]


@pytest.mark.parametrize("end", ["of its last worker", "of the frontend"])
async def test_a_model_that_is_no_longer_served_frees_its_memory(cluster: Any, end: str) -> None:
    """A tokenizer takes tens to hundreds of MB; it stayed in memory when a frontend stopped and its process went on."""
    await cluster.start()
    assert (await cluster.chat())[0] == 200
    models = cluster.frontend.app._api.models
    tokenizer = weakref.ref(models.get("m").text.tokenizer)
    if end == "of the frontend":
        await cluster.frontend.app.close()
        assert models.served() == []
    else:
        cluster.worker.service.stop("test")
        await eventually(lambda: models.get("m") is None)

    def is_gone() -> bool:
        gc.collect()
        return tokenizer() is None

    await eventually(is_gone, what="a tokenizer that is gone")


@pytest.mark.parametrize(
    ("absent_model_s", "status", "code"), [(60.0, 503, "no_workers"), (1e-9, 404, "model_not_found")]
)
async def test_a_model_that_has_just_lost_its_last_worker_is_worth_another_try(
    cluster: Any, absent_model_s: float, status: int, code: str
) -> None:
    await cluster.start(absent_model_s=absent_model_s)
    cluster.worker.service.stop("test")
    await eventually(lambda: cluster.frontend.app._api.models.get("m") is None)
    async with cluster.session.post("/v1/chat/completions", json=cluster.body()) as response:
        assert response.status == status
        assert (await response.json())["error"]["code"] == code
        assert ("Retry-After" in response.headers) == (status == 503)


async def test_a_model_that_a_worker_is_loading_is_worth_another_try(cluster: Any) -> None:
    await cluster.start()
    loading = await cluster.add_loading_worker("w2", "m2")
    await eventually(lambda: cluster.frontend.app._api.models.is_loading("m2"))
    bodies = {
        "/v1/chat/completions": {**cluster.body(), "model": "m2"},
        "/v1/responses": {"model": "m2", "input": "hi"},
        "/v1/messages": {"model": "m2", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
    }
    for path, body in bodies.items():
        async with cluster.session.post(path, json=body) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "5"
            error = (await response.json())["error"]
            assert "`m2` is still loading" in error["message"]
            assert error["type"] == ("overloaded_error" if path == "/v1/messages" else "service_unavailable_error")
            assert error.get("code") == (None if path == "/v1/messages" else "model_loading")
    assert await listed(cluster) == ["m"]
    loading.stop("test")
    await eventually(lambda: not cluster.frontend.app._api.models.is_loading("m2"))
    async with cluster.session.post("/v1/chat/completions", json=bodies["/v1/chat/completions"]) as response:
        assert response.status == 404


async def test_readiness_needs_a_model_and_a_router(cluster: Any) -> None:
    await cluster.add_frontend()
    health = cluster.frontend.service.health
    assert not health.ready
    cluster.worker = await cluster.add_worker()
    await eventually(lambda: health.is_ok("models"))
    assert not health.ready
    async with cluster.session.get("/readyz") as response:
        assert response.status == 503
    await cluster.add_router()
    await eventually(lambda: health.ready)
    async with cluster.session.get("/readyz") as response:
        assert response.status == 200


async def test_a_bundle_that_cannot_be_read_is_tried_again_and_harms_nobody(cluster: Any) -> None:
    await cluster.start()
    data = pack_bundle(ModelBundle({**byte_level_bundle().files, "generation_config.json": b"{}"}))
    await cluster.add_worker("w2", name="broken", bundle=ModelBundle({"tokenizer.json": b"{}"}))
    await cluster.add_worker("w3", name="late", bundle=None)
    late = await cluster.add_worker("w4", name="later")
    await late.register(late_card(cluster, bundle_name(data)))
    await eventually(lambda: cluster.metric("bundle_loads_total", outcome="failed") >= 2)
    assert "broken" not in await listed(cluster)
    await ObjectStore(late.service.bus).put(bundle_name(data), data)
    await eventually(lambda: cluster.frontend.app._api.models.get("later"))
    assert await listed(cluster) == ["late", "later", "m"]


def late_card(cluster: Any, bundle: str) -> Any:
    import msgspec

    return msgspec.structs.replace(cluster.card, name="later", bundle=bundle)


async def test_workers_with_another_card_under_the_same_name_get_nothing(cluster: Any) -> None:
    await cluster.start()
    await cluster.add_worker("a-other", fingerprint="other")
    models = cluster.frontend.app._api.models
    await eventually(lambda: models.get("m").offer.others)
    await cluster.chat()
    assert cluster.router.requests[0].allowed == ("w1",)
    cluster.worker.service.stop("test")
    await eventually(lambda: (m := models.get("m")) is not None and m.card.fingerprint == "other")


@pytest.mark.parametrize("stop", ["<|im_end|>", "plain"])
async def test_text_can_be_tokenised_and_back(cluster: Any, stop: str) -> None:
    await cluster.start()
    status, body = await cluster.post("/v1/tokenize", {"model": "m", "prompt": f"é{stop}", "return_token_strs": True})
    assert status == 200
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 512
    status, back = await cluster.post("/v1/detokenize", {"model": "m", "tokens": body["tokens"]})
    assert (status, back) == (200, {"prompt": f"é{stop}"})


async def test_messages_are_tokenised_as_a_request_would(cluster: Any) -> None:
    await cluster.start()
    _, tokenised = await cluster.post("/v1/tokenize", cluster.body("hi"))
    _, answer = await cluster.chat("hi")
    assert tokenised["count"] == answer["usage"]["prompt_tokens"]


async def test_bad_tokens_and_unknown_models_are_refused(cluster: Any) -> None:
    await cluster.start()
    status, body = await cluster.post("/v1/detokenize", {"model": "m", "tokens": [99999]})
    assert (status, body["error"]["param"]) == (400, "tokens")
    status, body = await cluster.post("/v1/tokenize", {"model": "x", "prompt": "a"})
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    status, body = await cluster.post("/v1/tokenize", {"model": "m"})
    assert status == 400


async def test_metrics_name_what_happens(cluster: Any) -> None:
    await cluster.start()
    await cluster.chat()
    async with cluster.session.get("/metrics") as response:
        text = await response.text()
    for name in (
        "kvbus_frontend_http_requests_total", "kvbus_frontend_time_to_first_token_seconds_count",
        "kvbus_frontend_tokens_total", "kvbus_frontend_models_served",
    ):  # fmt: skip
        assert name in text
