"""`python -m bench.soak.probe URL SECONDS`: requests /healthz and a frame in turn, and prints how long each took.

A separate process, so that the clients' work does not delay its measurements. It ends when its input ends.
"""

from __future__ import annotations

import http.client
import sys
import threading
import time
from urllib.parse import urlsplit

PATHS = ("/healthz", "/live/frame")


def main(url: str, pause_s: float) -> None:
    """Prints one line per request: path, status, milliseconds. The first of each is left out: it opens the
    connection."""
    ended = threading.Event()
    threading.Thread(target=_wait_for_end, args=(ended,), daemon=True).start()
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    told = False
    while not ended.wait(pause_s):
        for path in PATHS:
            began = time.perf_counter()
            try:
                connection.request("GET", path)
                reply = connection.getresponse()
                reply.read()
                status = reply.status
            except (OSError, http.client.HTTPException):
                connection.close()
                status = 0
            if told:
                print(path, status, f"{(time.perf_counter() - began) * 1e3:.3f}", flush=True)
        told = True


def _wait_for_end(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
