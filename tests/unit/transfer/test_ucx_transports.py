import pytest

from kvbus_transfer.backends.ucx_channel import direct_transports


@pytest.mark.parametrize(
    ("wanted", "direct"),
    [
        ("all", "^tcp"),
        ("", "^tcp"),
        ("^cma", "^cma,tcp"),
        ("tcp,self", ""),
        ("tcp", ""),
        ("cma,sm,tcp,self", "cma,sm,self"),
        ("rc,all", "^tcp"),
    ],
)
def test_memory_is_never_read_over_tcp(wanted: str, direct: str) -> None:
    assert direct_transports(wanted) == direct


def test_what_the_environment_allows_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "rc,tcp")
    assert direct_transports() == "rc"
    monkeypatch.delenv("UCX_TLS")
    assert direct_transports() == "^tcp"
