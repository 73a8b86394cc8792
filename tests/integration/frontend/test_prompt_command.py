"""`kvbus prompt` against a running frontend."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from kvbus_cli.__main__ import main
from kvbus_protocols.prompt_view import PromptView

MESSAGES = {
    "model": "m",
    "max_tokens": 5,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.140.9ea; cch=0865d;"},
        {"type": "text", "text": "You are an agent.\nIt is 2026-11-29."},
    ],
    "messages": [{"role": "user", "content": "Hello"}],
}


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    other = json.loads(json.dumps(MESSAGES).replace("2026-11-29", "2026-11-30").replace("0865d", "bfdf1"))
    for name, body in (("a.json", MESSAGES), ("b.json", other)):
        (tmp_path / name).write_text(json.dumps(body))
    return str(tmp_path / "a.json"), str(tmp_path / "b.json")


async def run(*arguments: str) -> int:
    return await asyncio.to_thread(main, ["prompt", *arguments])


async def test_a_prompt_is_rendered(cluster: Any, files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    await cluster.start()
    capsys.readouterr()
    assert await run("render", files[0], "--url", cluster.url, "--blocks") == 0
    out = capsys.readouterr().out
    assert "messages · m · " in out
    assert "── system[1].text · 35 tokens from 8 · blocks 2-10\nYou are an agent.\nIt is 2026-11-29.\n" in out
    assert "anthropic-preamble system[0].text: x-anthropic-billing-header:" in out
    assert "\x1b" not in out
    assert await run("render", files[0], "--url", cluster.url, "--json") == 0
    lines = capsys.readouterr().out.splitlines()
    view = msgspec.json.decode(lines[-1], type=PromptView)
    assert (view.api, view.rules[0].source) == ("messages", "system[0].text")


async def test_two_prompts_are_compared(
    cluster: Any, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    await cluster.start(api_key="k")
    capsys.readouterr()
    assert await run("diff", *files, "--url", cluster.url, "--api-key", "k") == 0
    out = capsys.readouterr().out
    assert "  A  system[1].text at char 32\n  B  system[1].text at char 32\n" in out
    assert 'a volatile line: "It is 2026-11-29." and "It is 2026-11-30." differ in ids, dates or numbers only' in out
    header = ("--header", "X-Api-Key: k")
    assert await run("diff", *files, "--url", cluster.url, *header, "--json") == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["difference"]["common_tokens"], told["difference"]["common_blocks"]) == (40, 10)
    assert told["difference"]["a"]["source"] == "system[1].text"
    assert [rule["rule"] for rules in told["rules"] for rule in rules] == ["anthropic-preamble"] * 2


async def test_each_failure_is_one_line_and_status_2(
    cluster: Any, files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await cluster.start()
    (tmp_path / "text.json").write_text("no json")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "empty.json").write_text('{"model": "m", "messages": []}')
    (tmp_path / "nobody.json").write_text('{"model": "nobody", "messages": [{"role": "user", "content": "x"}]}')
    async with old_server() as old:
        capsys.readouterr()
        for arguments, expected in (
            ((str(tmp_path / "none.json"),), "none.json cannot be read: No such file"),
            ((str(tmp_path / "text.json"),), "text.json is no JSON: "),
            ((str(tmp_path / "list.json"),), "list.json is no request body"),
            ((str(tmp_path / "empty.json"),), "empty.json is refused as a request of the API 'chat' (HTTP 400): "),
            ((str(tmp_path / "nobody.json"),), "(HTTP 404): The model `nobody` does not exist"),
            ((files[0], "--header", "nonsense"), "--header takes NAME:VALUE"),
            ((files[0], "--url", "http://127.0.0.1:9"), "http://127.0.0.1:9 does not answer: "),
            ((files[0], "--url", "http://127.0.0.1:port"), "http://127.0.0.1:port does not answer: "),
            ((files[0], "--url", "http://[::1"), "http://[::1 does not answer: "),
            ((files[0], "--url", old), f"the server at {old} has no /v1/prompt"),
        ):
            assert await run("render", "--url", cluster.url, *arguments) == 2
            error = capsys.readouterr().err
            assert expected in error, error
            assert error.startswith("kvbus prompt: ")
            assert error.count("\n") == 1


@asynccontextmanager
async def old_server() -> AsyncIterator[str]:
    """A server without the endpoint."""
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()
