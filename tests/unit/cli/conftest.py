import pytest


@pytest.fixture(autouse=True)
def logs_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb sets up the logs of its process, which here is that of all tests: they would go to what pytest has closed by then."""
    monkeypatch.setattr("kvbus_runtime.log.configure", lambda level, log_format: None)
