from __future__ import annotations

import pytest

from inferscale_runtime.bench.quality.settings import (
    DEFAULT_SETTINGS,
    Setting,
    parse_setting,
    parse_settings,
)
from inferscale_runtime.errors import ConfigError


def test_names_read_back() -> None:
    assert parse_setting("neighbours:10+link5") == Setting("neighbours:10", 5)
    assert parse_setting("none+stored+link2") == Setting("none", 2, "stored")
    for setting in parse_settings(DEFAULT_SETTINGS):
        assert parse_setting(setting.name) == setting


def test_each_once() -> None:
    assert [s.name for s in parse_settings("none, facts:5,none")] == ["none", "facts:5"]


@pytest.mark.parametrize("text", ["none+link0", "none+tail5", "none+", "some:5", "", "none+link5x"])
def test_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_settings(text)
