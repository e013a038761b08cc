"""``/metrics`` over HTTP: GET and HEAD of that one path, nothing else.

Nobody is authenticated here, so every caller is bounded: how many at once, how long one may take
altogether, and how much it may send. Beyond that the connection is closed.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import logging
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from slurm_synergy.config import parse_address
from slurm_synergy.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["MetricsServer"]

_LOG = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S = 10.0
_MAX_CALLERS = 16
_MAX_REQUEST_BYTES = 16 * 1024


class _Bounded(io.RawIOBase):
    """Reads from ``raw`` until the bound, then refuses."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw, self._left = raw, _MAX_REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        count = self._raw.readinto(buffer) or 0
        self._left -= count
        if self._left < 0:
            raise http.client.LineTooLong("request")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    # Threads are not joined at the end: a slow caller must not hold up a stop.
    block_on_close = False

    def __init__(self, address: tuple[str, int], registry: CollectorRegistry) -> None:
        self._since_s: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.registry = registry
        super().__init__(address, _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more caller; it has its time from now on."""
        with self._lock:
            if len(self._since_s) >= _MAX_CALLERS:
                return False
            self._since_s[request] = time.monotonic()
            return True

    def shutdown_request(self, request: Any) -> None:
        """Done with a caller, or with one that there was no room for."""
        with self._lock:
            self._since_s.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Twice a second: hang up on who takes too long."""
        late_s = time.monotonic() - _REQUEST_TIMEOUT_S
        with self._lock:
            for request in [one for one, at_s in self._since_s.items() if at_s < late_s]:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """A caller that hung up is nothing to speak of."""
        _LOG.debug("metrics: a request of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_TIMEOUT_S
    server_version, sys_version = "slurm-synergyd", ""

    def setup(self) -> None:
        """As usual, but what is read is bounded."""
        super().setup()
        self.rfile.close()
        raw = self.connection.makefile("rb", buffering=0)
        self.rfile = io.BufferedReader(_Bounded(raw), 1024)

    def do_GET(self) -> None:
        """The figures, in the format that the caller prefers."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """The same without the figures."""
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        from prometheus_client.exposition import choose_encoder

        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is here")
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        body = encode(self.server.registry)
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are no news."""
        _LOG.debug("metrics: " + format, *args)


class MetricsServer:
    """Serves ``registry`` at ``listen`` (HOST:PORT) in threads of its own; use ``with``.

    Raises ConfigError when nothing can be served there.
    """

    def __init__(self, listen: str, registry: CollectorRegistry) -> None:
        host, port = parse_address(listen)
        try:
            self._server = _Server((host, port), registry)
        except OSError as err:
            raise ConfigError(
                f"cannot be listened on: {err}",
                key="metrics.listen",
                value=listen,
                remedy="choose another address or port, or null for no metrics",
            ) from err
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )

    @property
    def url(self) -> str:
        """Where the figures are."""
        host, port = self._server.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{shown}:{port}/metrics"

    def __enter__(self) -> MetricsServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)
