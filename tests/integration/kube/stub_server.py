"""A stand-in for a server pod: says who it is and what it was sent.

    python tests/integration/kube/stub_server.py ADDRESS PORT

A chat request's ``wait`` (seconds) delays its answer, ``stream`` (a number) asks for so many lines,
a tenth of a second apart.
"""

from __future__ import annotations

import json
import sys
import time
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def _lower(headers: Message) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({"path": self.path})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        time.sleep(body.get("wait", 0))
        lines = body.get("lines", 0)
        if not lines:
            self._answer({"path": self.path, "body": body, "headers": _lower(self.headers)})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for number in range(lines):
            self.wfile.write(f"data: {number}\n\n".encode())
            self.wfile.flush()
            time.sleep(0.1)

    def _answer(self, what: dict[str, object]) -> None:
        data = json.dumps({"by": self.server.server_address[0], **what}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
