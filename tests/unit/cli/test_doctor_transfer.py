import sys
from unittest import mock

from kvbus_cli.doctor.checks import Facts, Level, findings
from kvbus_transfer.backends.choice import BACKENDS, missing_here


def test_backends_that_are_not_here_are_notes_that_say_what_to_do() -> None:
    transfer = {"shm": "", "nixl": "NIXL is not installed (pip install 'kvbus[nixl]')", "ucx": "", "tcp": ""}
    told = findings(Facts(server="s", instances=[], stream=None, indexers=[], transfer=transfer))
    rows = [(finding.level, finding.text) for finding in told if finding.about == "transfer"]
    assert rows == [
        (Level.OK, "KV blocks can be moved here by shm, ucx, tcp"),
        (Level.NOTE, "not by nixl here: NIXL is not installed (pip install 'kvbus[nixl]')"),
    ]


def test_a_missing_library_is_a_message_and_never_an_import_error() -> None:
    gone = dict.fromkeys(("nixl_cu12._api", "nixl_cu13._api", "nixl._api", "ucxx._lib.libucxx"))
    with mock.patch.dict(sys.modules, gone):  # None in there makes an import fail
        missing = missing_here()
    assert list(missing) == list(BACKENDS)
    assert "kvbus[nixl]" in missing["nixl"]
    assert "kvbus[ucx]" in missing["ucx"]
    assert missing["tcp"] == ""
