"""Ports for servers that bind them seconds later."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A port that nobody listens on, below those that outgoing connections are given.

    A port of the ephemeral range may go to any connection of a test beside this one until the
    server binds it.
    """
    chosen = random.SystemRandom()
    while True:
        port = chosen.randrange(15_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
