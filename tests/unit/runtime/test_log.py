import json
import subprocess
import sys

import pytest

from kvbus_runtime.log import Seldom

PROGRAM = """
import logging, sys
from kvbus_runtime import log
log.configure(sys.argv[1], sys.argv[2])
logger = log.get_logger(service="worker")
logger.debug("hidden")
logger.info("request", request="r1", seconds=0.5, code=None)
try:
    raise LookupError("the cause")
except LookupError:
    logger.exception("failed")
logging.getLogger("aiohttp.server").warning("from %s", "elsewhere")
logging.getLogger("aiohttp.access").info("chatter")
"""


def run(level: str, form: str) -> list[str]:
    result = subprocess.run([sys.executable, "-c", PROGRAM, level, form], capture_output=True, text=True, check=True)
    assert result.stdout == ""
    return result.stderr.splitlines()


@pytest.mark.parametrize("form", ["json", "auto"])
def test_away_from_a_terminal_every_line_is_json_also_those_of_other_libraries(form: str) -> None:
    request, failed, foreign = (json.loads(line) for line in run("info", form))
    assert (request["event"], request["level"], request["service"]) == ("request", "info", "worker")
    assert (request["request"], request["seconds"], request["code"]) == ("r1", 0.5, None)
    assert request["timestamp"].endswith("Z")
    assert "LookupError: the cause" in failed["exception"]
    assert (foreign["event"], foreign["level"], foreign["logger"]) == ("from elsewhere", "warning", "aiohttp.server")


def test_a_line_that_can_be_provoked_passes_once_a_minute_with_the_number_of_the_others() -> None:
    now = [0.0]
    lines = Seldom(60.0, clock=lambda: now[0])
    told = []
    for now[0] in (0.0, 0.1, 59.9, 60.0, 119.9, 120.1, 500.0):
        told.append(lines.turn())
    assert told == [0, None, None, 2, None, 1, 0]


def test_the_level_is_respected() -> None:
    assert [json.loads(line)["event"] for line in run("error", "json")] == ["failed"]
    assert json.loads(run("debug", "json")[0])["event"] == "hidden"


def test_the_console_form_is_for_people() -> None:
    text = "\n".join(run("info", "console"))
    assert "request" in text
    assert "LookupError" in text
    assert not text.startswith("{")
