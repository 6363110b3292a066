"""Signing keys, tokens and a server of JWKS documents."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

ISSUER = "https://issuer.example"
AUDIENCE = "inferscale"


def rsa_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def jwk(key: Any, key_id: str) -> dict[str, Any]:
    algorithm = RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else ECAlgorithm
    text = algorithm.to_jwk(key.public_key())
    return {**json.loads(text), "kid": key_id, "use": "sig"}


def token(key: Any, key_id: str | None = "a", algorithm: str = "RS256", **claims: Any) -> str:
    body = {"iss": ISSUER, "aud": AUDIENCE, "sub": "maya", "exp": time.time() + 60, **claims}
    body = {name: value for name, value in body.items() if value is not None}
    headers = {"kid": key_id} if key_id else {}
    return jwt.encode(body, key, algorithm=algorithm, headers=headers)


class Issuer:
    """Serves a JWKS; counts how often it is asked."""

    def __init__(self) -> None:
        self.document: Any = {"keys": []}
        self.status = 200
        self.asked = 0
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked += 1
                body = json.dumps(issuer.document).encode()
                self.send_response(issuer.status)
                self.send_header("content-length", str(len(body)))
                self.send_header("location", "/elsewhere")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/jwks"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    opened = Issuer()
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def signing() -> SimpleNamespace:
    return SimpleNamespace(
        rsa=rsa_key(),
        other=rsa_key(),
        ec=ec.generate_private_key(ec.SECP256R1()),
        jwk=jwk,
        token=token,
        ISSUER=ISSUER,
        AUDIENCE=AUDIENCE,
    )
