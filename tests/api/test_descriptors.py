"""A server that may have few descriptors asks for as many as its connections need."""

from __future__ import annotations

import logging
import resource

import pytest

from smon.api.descriptors import OTHERS, ask_for

UNLIMITED = resource.RLIM_INFINITY


class System:
    """Limits of a process."""

    def __init__(self, soft: int, hard: int, patch: pytest.MonkeyPatch) -> None:
        self.limits = soft, hard
        patch.setattr(resource, "getrlimit", lambda _: self.limits)
        patch.setattr(resource, "setrlimit", self.set)

    def set(self, _: int, limits: tuple[int, int]) -> None:
        """As the system: nobody raises the hard limit."""
        assert limits[1] == self.limits[1]
        assert self.limits[1] == UNLIMITED or limits[0] <= self.limits[1]
        self.limits = limits


@pytest.mark.parametrize("hard", [4096, 1 << 20, UNLIMITED])
def test_what_is_needed_is_asked_for(hard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections, and files besides; the hard limit stays."""
    system = System(1024, hard, monkeypatch)
    assert ask_for(2000)
    assert system.limits == (2000 + OTHERS, hard)


@pytest.mark.parametrize("soft", [65536, UNLIMITED])
def test_what_is_there_is_not_lowered(soft: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than is needed stays."""
    system = System(soft, UNLIMITED, monkeypatch)
    assert ask_for(2000)
    assert system.limits == (soft, UNLIMITED)


@pytest.mark.parametrize("soft", [256, 1024])
def test_what_the_system_does_not_give_is_said(
    soft: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All that can be had, and a line that says what to do."""
    system = System(soft, 1024, monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert not ask_for(8192)
    assert system.limits == (1024, 1024)
    assert f"set SMON_MAX_CONNECTIONS to {1024 - OTHERS}" in caplog.text


def test_this_process_can_be_asked() -> None:
    """The real calls, with what this process has."""
    assert ask_for(1)
