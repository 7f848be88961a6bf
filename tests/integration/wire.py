"""A line between an edge and its server that can be long, cut, silenced and mended."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress


class Wire:
    """Carries TCP connections from ``port`` on 127.0.0.1 to another one there; what is said arrives ``delay`` seconds later."""

    def __init__(self, to: int, delay: float = 0.0) -> None:
        self.to, self._delay = to, delay
        self._open = threading.Event()
        self._open.set()
        self._cut = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def cut(self) -> None:
        """Hang up on both sides, and take no connections until it is mended."""
        self._cut = True
        self._hang_up()

    def silence(self) -> None:
        """Carry nothing more, and tell nobody."""
        self._open.clear()

    def mend(self) -> None:
        """New connections are carried again; what was silenced is gone."""
        self._hang_up()
        self._cut = False
        self._open.set()

    def close(self) -> None:
        self.cut()
        self._open.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for a connection
        self._accepting.join()
        self._listener.close()

    def _hang_up(self) -> None:
        pairs, self._pairs = self._pairs, []
        for each in (one for pair in pairs for one in pair):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self._cut:
                    near.close()
                    continue
                try:
                    far = socket.create_connection(("127.0.0.1", self.to))
                except OSError:
                    near.close()
                    continue
                self._pairs.append((near, far))
                threading.Thread(target=self._carry_both, args=(near, far), daemon=True).start()

    def _carry_both(self, near: socket.socket, far: socket.socket) -> None:
        back = threading.Thread(target=self._carry, args=(far, near), daemon=True)
        back.start()
        self._carry(near, far)
        back.join()
        near.close()
        far.close()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._open.wait()
                time.sleep(self._delay)
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
