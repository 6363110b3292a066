"""SIGTERM while encoding."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from inferscale_runtime.encode.stop import StopSignal, Terminated


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    before = signal.getsignal(signal.SIGTERM)
    stop = StopSignal()
    stop.install()
    yield stop
    signal.signal(signal.SIGTERM, before)


def test_at_once_with_the_shell_s_status(stop: StopSignal) -> None:
    with pytest.raises(Terminated) as caught:
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 143


def test_deferred_until_the_work_in_hand_is_done(stop: StopSignal) -> None:
    done = []

    def work() -> None:
        with stop.deferred():
            with stop.deferred():
                os.kill(os.getpid(), signal.SIGTERM)
                assert stop.requested
            done.append("inner")
            done.append("outer")

    with pytest.raises(Terminated):
        work()
    assert done == ["inner", "outer"]


def test_an_error_inside_is_not_hidden(stop: StopSignal) -> None:
    def fail() -> None:
        with stop.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        fail()


def test_nothing_came(stop: StopSignal) -> None:
    with stop.deferred():
        pass
    stop.check()
