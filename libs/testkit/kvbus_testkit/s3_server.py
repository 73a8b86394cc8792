"""A real S3 server under the control of a test (SeaweedFS)."""

import ctypes
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from kvbus_testkit.pausing import pause, resume
from kvbus_testkit.timing import eventually_sync

ACCESS_KEY = "kvbus-test"
SECRET_KEY = "not-a-secret"  # noqa: S105
BUCKET = "blocks"
_PR_SET_PDEATHSIG = 1


class S3Server:
    """Starts at once; a context manager. Listens on loopback only, and ends with the process that started it."""

    def __init__(self) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="kvbus-s3-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = ""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    @property
    def env(self) -> dict[str, str]:
        """The variables by which clients of S3 find it."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
        }

    def _start(self) -> None:
        identity = {
            "name": "kvbus",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        config = self._home / "s3.json"
        config.write_bytes(msgspec.json.encode({"identities": [identity]}))
        names = [f"{server}.{port}" for server in ("master", "volume", "filer", "s3") for port in ("port", "port.grpc")]
        ports = dict(zip(names, _free_ports(len(names)), strict=True))
        flags = [f"-{name}={port}" for name, port in ports.items()]
        self.endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        with (self._home / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(_binary()),
                    *("server", "-s3", "-filer", f"-dir={self._home}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
                    *(f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false"),
                    *("-volume.max=4", "-master.volumeSizeLimitMB=256", "-master.telemetry=false", *flags),
                ],
                stdout=log,
                stderr=log,
                cwd=self._home,
                preexec_fn=_end_with_parent,
            )
        eventually_sync(self._makes_bucket, timeout_s=60, what="S3 server")

    def _makes_bucket(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the S3 server ended: {(self._home / 'server.log').read_text()}"
        # Only a write proves that all its parts have found each other.
        import obstore
        from obstore.store import S3Store

        store = S3Store(
            BUCKET,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            endpoint=self.endpoint,
            region="us-east-1",
            client_options={"allow_http": True, "timeout": "2s"},
            retry_config={"max_retries": 0},
        )
        try:
            obstore.put(store, "ready", b"yes")
        except Exception:
            return False
        return True

    def pause(self) -> None:
        """It answers nobody any more; connections stay."""
        assert self._process is not None
        pause(self._process.pid)

    def resume(self) -> None:
        assert self._process is not None
        resume(self._process.pid)

    def stop(self) -> None:
        """End the server and remove its data. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        shutil.rmtree(self._home, ignore_errors=True)

    def __enter__(self) -> "S3Server":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def _binary() -> Path:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    assert found, "there is no SeaweedFS: install the extra `dev`"
    return Path(found)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
