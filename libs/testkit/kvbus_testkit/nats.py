"""A real nats-server under the control of a test."""

import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import msgspec

from kvbus_runtime.nats_server import ServerConfig, command, find_nats_server, read_url
from kvbus_testkit.pausing import pause, resume
from kvbus_testkit.timing import eventually_sync


class NatsServer:
    """Starts at once; a context manager. The port stays the same over restarts.

    ``extra`` is put into the configuration file as it is (users, TLS, permissions).
    """

    def __init__(
        self,
        *,
        max_payload_bytes: int = 1 << 20,
        extra: str = "",
        url_scheme: str = "nats",
        binary: Path | None = None,
        port: int = -1,
        host: str = "127.0.0.1",
    ) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="kvbus-nats-"))
        self._binary = binary or find_nats_server()
        self._scheme = url_scheme
        self._host = host
        self._ports_dir = self._home / "ports"
        self._ports_dir.mkdir()
        self.store_dir = self._home / "store"
        self.config = ServerConfig(
            store_dir=self.store_dir,
            port=port,
            host=host,
            ports_dir=self._ports_dir,
            max_payload_bytes=max_payload_bytes,
            # Streams reserve their limits, and every test's namespace has its own.
            max_file_store_bytes=1 << 44,
            max_memory_store_bytes=1 << 40,
            extra=extra,
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        try:
            self.start()
        except BaseException:
            self.stop()
            raise

    @property
    def log_file(self) -> Path:
        return self._home / "server.log"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is stopped"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        config_file = self._home / "nats.conf"
        config_file.write_text(self.config.render())
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(command(self._binary, config_file), stdout=log, stderr=log)
        url = eventually_sync(self._listening, what="nats-server listening") or ""
        port = int(url.rpartition(":")[2])
        self.url = f"{self._scheme}://{self._host}:{port}"
        self.config = msgspec.structs.replace(self.config, port=port)

    def _listening(self) -> str | None:
        assert self.is_running, f"nats-server ended: {self.log_file.read_text()}"
        url = read_url(self._ports_dir, self.pid)
        if url is None:
            return None
        try:
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=1):
                return url
        except OSError:
            return None

    def reconfigure(self, *, max_payload_bytes: int) -> None:
        """Takes effect at the next start."""
        self.config = msgspec.structs.replace(self.config, max_payload_bytes=max_payload_bytes)

    def pause(self) -> None:
        pause(self.pid)

    def resume(self) -> None:
        resume(self.pid)

    def kill(self) -> None:
        """SIGKILL; the data stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def terminate(self) -> None:
        """An orderly end; the data stays."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def restart(self, *, wipe: bool = False) -> None:
        """``wipe``: it comes back without its JetStream data."""
        self.kill()
        if wipe:
            shutil.rmtree(self.store_dir, ignore_errors=True)
        self.start()

    def stop(self) -> None:
        """End the server and remove its data. Idempotent."""
        self.terminate()
        shutil.rmtree(self._home, ignore_errors=True)

    def __enter__(self) -> "NatsServer":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
