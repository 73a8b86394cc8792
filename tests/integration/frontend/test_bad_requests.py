"""Bad input gets the right status and an error body in the API's shape, and touches nobody else."""

import asyncio
import gzip
import zlib
from typing import Any

import brotli
import pytest
import yarl
import zstandard

from kvbus_testkit.timing import eventually

CHAT = "/v1/chat/completions"
GOOD = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


async def send(cluster: Any, body: bytes, path: str = CHAT, **headers: str) -> tuple[int, Any]:
    async with cluster.session.post(path, data=body, headers=headers) as response:
        assert response.content_type == "application/json"
        return response.status, await response.json()


def assert_error_shape(body: Any) -> None:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "invalid_json", None),
        (b"", 400, "invalid_json", None),
        (b'{"model":"\xff"}', 400, "invalid_utf8", None),
        (GOOD[:-1] + b',"temperature":"hot"}', 400, "invalid_value", "temperature"),
        (GOOD[:-1] + b',"n":0}', 400, "invalid_value", "n"),
        (GOOD[:-1] + b',"n":65}', 400, "too_many", "n"),
        (b'{"model":"m"}', 400, "missing_required_parameter", "messages"),
        (b'{"model":"m","messages":[]}', 400, "invalid_value", "messages"),
        (GOOD.replace(b'"m"', b'"nobody"'), 404, "model_not_found", "model"),
        (GOOD.replace(b"hi", b"x" * 600), 400, "context_length_exceeded", "messages"),
        (GOOD[:-1] + b',"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400, "nesting_too_deep", None),
        (GOOD[:-1] + b',"chat_template_kwargs":{"x":' + b"[" * 300 + b"]" * 300 + b"}}", None, None, None),
        (GOOD[:-1] + b',"tool_choice":"required"}', 400, None, "tool_choice"),
        (
            GOOD[:-1] + b',"continue_final_message":true,"messages":[{"role":"user","content":""}]}',
            400,
            "template_error",
            "messages",
        ),
    ],
)
async def test_a_bad_body_is_refused(
    cluster: Any, body: bytes, status: int | None, code: str | None, param: str | None
) -> None:
    await cluster.start()
    got, answer = await send(cluster, body)
    if status is not None:
        assert (got, answer["error"]["code"], answer["error"]["param"]) == (status, code, param)
        assert_error_shape(answer)
        assert not cluster.router.requests
    else:
        assert got in (200, 400)


async def test_half_an_emoji_is_no_reason_to_refuse(cluster: Any) -> None:
    await cluster.start()
    status, _ = await send(cluster, GOOD.replace(b"hi", rb"hi \ud83d"))
    assert status == 200


async def test_a_body_at_the_limit_passes_and_one_over_it_is_413(cluster: Any) -> None:
    await cluster.start(max_body_bytes=100)
    assert (await send(cluster, GOOD.ljust(100)))[0] == 200
    status, body = await send(cluster, GOOD.ljust(101))
    assert (status, body["error"]["code"]) == (413, "request_too_large")
    assert_error_shape(body)
    assert cluster.metric("requests_refused_total", limit="body_bytes") == 1


async def test_a_body_of_unknown_length_is_limited_too(cluster: Any) -> None:
    await cluster.start(max_body_bytes=100)

    async def pieces() -> Any:
        for _ in range(50):
            yield b" " * 10

    async with cluster.session.post(CHAT, data=pieces()) as response:
        assert response.status == 413


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("br", brotli.compress),
        ("zstd", zstandard.ZstdCompressor().compress),
        ("gzip, br", lambda data: brotli.compress(gzip.compress(data))),
    ],
)
async def test_packed_bodies_are_unpacked_within_the_limit(cluster: Any, encoding: str, pack: Any) -> None:
    await cluster.start(max_body_bytes=1000)
    assert (await send(cluster, pack(GOOD), **{"Content-Encoding": encoding}))[0] == 200
    status, body = await send(cluster, pack(GOOD.ljust(1_000_000)), **{"Content-Encoding": encoding})
    assert (status, body["error"]["code"]) == (413, "request_too_large")
    for broken in (b"garbage", pack(GOOD)[:-5]):
        status, body = await send(cluster, broken, **{"Content-Encoding": encoding})
        assert (status, body["error"]["code"]) == (400, "invalid_encoding")


async def test_an_unknown_encoding_is_415(cluster: Any) -> None:
    await cluster.start()
    async with cluster.session.post(CHAT, data=GOOD, headers={"Content-Encoding": "compress"}) as response:
        body = await response.json()
        assert (response.status, body["error"]["code"]) == (415, "unsupported_encoding")
        assert response.headers["Accept-Encoding"] == "gzip, deflate, br, zstd"


async def test_too_many_messages_and_tools_are_refused(cluster: Any) -> None:
    await cluster.start(max_messages=2, max_tools=1)
    message = {"role": "user", "content": "x"}
    tool = {"type": "function", "function": {"name": "f"}}
    for fields, param in (({"messages": [message] * 3}, "messages"), ({"tools": [tool] * 2}, "tools")):
        status, body = await cluster.chat(**fields)
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, "too_many", param)
    assert (await cluster.chat(messages=[message] * 2, tools=[tool]))[0] == 200


async def test_paths_and_methods_that_do_not_exist_are_told_in_the_same_shape(cluster: Any) -> None:
    await cluster.start()
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models", 405)):
        async with cluster.session.request(method, path) as response:
            assert response.status == status
            assert_error_shape(await response.json())


async def test_the_key_is_asked_for_where_one_is_set(cluster: Any) -> None:
    await cluster.start(api_key="sk-one, sk-two")
    for headers, code in (({}, "missing_api_key"), ({"Authorization": "Bearer wrong"}, "invalid_api_key")):
        status, body = await send(cluster, GOOD, **headers)
        assert (status, body["error"]["code"]) == (401, code)
        assert_error_shape(body)
    assert (await send(cluster, GOOD, Authorization="Bearer sk-two"))[0] == 200
    async with cluster.session.get("/v1/models") as response:
        assert response.status == 401
    for path in ("/livez", "/readyz", "/metrics"):
        async with cluster.session.get(path) as response:
            assert response.status == 200


async def test_a_refusal_of_the_template_is_the_clients_fault(cluster: Any) -> None:
    from kvbus_tokenizers import byte_level_bundle

    template = "{% if messages[0].role != 'system' %}{{ raise_exception('a system message comes first') }}{% endif %}"
    await cluster.start(bundle=byte_level_bundle(chat_template=template))
    status, body = await cluster.chat()
    assert (status, body["error"]["code"]) == (400, "template_error")
    assert "a system message comes first" in body["error"]["message"]


async def test_a_model_without_a_template_says_so(cluster: Any) -> None:
    from kvbus_tokenizers import ModelBundle, byte_level_bundle

    files = {k: v for k, v in byte_level_bundle().files.items() if k != "chat_template.jinja"}
    await cluster.start(bundle=ModelBundle(files))
    status, body = await cluster.chat()
    assert (status, body["error"]["code"]) == (400, "no_chat_template")
    assert (await cluster.post("/v1/completions", {"model": "m", "prompt": "x"}))[0] == 200


async def test_a_body_that_breaks_off_or_is_badly_framed_harms_nobody(cluster: Any) -> None:
    await cluster.start()
    url = yarl.URL(cluster.url)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for rest in (b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n"):
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(head + rest)
        writer.write_eof()
        await reader.read()
        writer.close()
    await eventually(lambda: cluster.metric("requests_in_flight") == 0)
    assert cluster.metric("http_requests_total", api="chat", status="500") == 0
    assert (await cluster.chat())[0] == 200


async def test_an_error_does_not_repeat_a_huge_request(cluster: Any) -> None:
    await cluster.start()
    status, body = await cluster.chat(model="x" * 1_000_000)
    assert status == 404
    assert len(body["error"]["message"]) < 2000


async def test_a_body_that_stops_coming_is_408(cluster: Any) -> None:
    await cluster.start(body_timeout_s=0.05)
    never = asyncio.Event()

    async def pieces() -> Any:
        yield b"{"
        await never.wait()

    async with cluster.session.post(CHAT, data=pieces()) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (408, "body_timeout")


async def test_a_body_that_only_trickles_is_408_too(cluster: Any) -> None:
    await cluster.start(body_timeout_s=5.0, body_total_timeout_s=0.2)

    async def pieces() -> Any:
        while True:
            yield b" "
            await asyncio.sleep(0.02)

    async with cluster.session.post(CHAT, data=pieces()) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (408, "body_timeout")
    await eventually(lambda: cluster.metric("requests_in_flight") == 0)


async def test_bytes_that_are_no_http_are_counted_and_do_not_get_into_the_log(
    cluster: Any, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    await cluster.start()
    address = yarl.URL(cluster.url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"POST /v1/models HTTP/1.1\r\nHost: h\r\nX-Prompt: my secret\0prompt\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert b" 400 " in answer
    assert cluster.metric("http_rejected_total", status="400") >= 1
    assert "secret" not in caplog.text
    output = capsys.readouterr().out
    assert "bad_http" in output
    assert "secret" not in output
    assert (await cluster.chat())[0] == 200


async def test_what_can_just_be_read_can_be_answered_and_stored(cluster: Any) -> None:
    """Where a request is too deep differs between versions of Python; nowhere does it fail later than when it is read."""
    await cluster.start()
    headers = {
        "Content-Type": "application/json",
        "session-id": "s",
        "x-codex-turn-metadata": '{"request_kind": "turn"}',
    }
    statuses = []
    for depth in range(800, 1000, 4):
        deep = b'{"a":' * depth + b"{}" + b"}" * depth
        data = b'{"model":"m","input":"x","tools":[{"type":"function","name":"f","parameters":%s}]}' % deep
        async with cluster.session.post("/v1/responses", data=data, headers=headers) as response:
            statuses.append(response.status)
    assert set(statuses) <= {200, 400}
    assert statuses == sorted(statuses)
