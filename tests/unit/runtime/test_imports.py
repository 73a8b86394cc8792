import subprocess
import sys

HEAVY = ("torch", "numpy", "numba", "transformers", "tokenizers", "jinja2")


def test_the_runtime_is_light_to_import() -> None:
    code = (
        "import sys, kvbus_runtime.service, kvbus_runtime.event_log, kvbus_runtime.objects,"
        " kvbus_runtime.streams.sender, kvbus_runtime.streams.receiver;"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_settings_need_neither_nats_nor_http() -> None:
    code = "import sys, kvbus_runtime.settings; print([n for n in ('nats', 'aiohttp', 'uvloop') if n in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
