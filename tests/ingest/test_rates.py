from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from smon.errors import WireError
from smon.ingest.rates import InFlight, TenantRates, jitter
from smon.wire.problems import Problem
from tests.ingest.batches import settings


def _in_flight(limit: int) -> tuple[InFlight, Gauge]:
    gauge = Gauge("bytes", "of bodies", registry=CollectorRegistry())
    return InFlight(limit, gauge, lambda: 1.0), gauge


def _refused(budget: InFlight, size: int, who: str = "a") -> float:
    with pytest.raises(WireError) as caught, budget.reserve(size, who):
        pass
    assert caught.value.problem == Problem.OVERLOADED
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


def test_bodies_in_flight_have_a_limit() -> None:
    """Below and at the limit there is room, above there is none; what leaves makes room."""
    budget, gauge = _in_flight(100)
    with budget.reserve(60, "a"):
        with budget.reserve(39, "b"), budget.reserve(1, "c"):
            assert gauge._value.get() == 100
            _refused(budget, 1)
        _refused(budget, 41)
        with budget.reserve(40, "b"):
            pass
    assert gauge._value.get() == 0


def test_one_tenant_alone_leaves_a_quarter_of_the_room() -> None:
    """Whoever comes with nothing in flight finds some, and what it may hold in turn is less."""
    budget, gauge = _in_flight(100)
    with ExitStack() as held:
        for _ in range(7):
            held.enter_context(budget.reserve(10, "greedy", "x"))
        _refused(budget, 10, "greedy")
        held.enter_context(budget.reserve(5, "greedy", "y"))
        _refused(budget, 1, "greedy")
        held.enter_context(budget.reserve(10, "other"))
        _refused(budget, 10, "greedy")
        _refused(budget, 16, "third")
        held.enter_context(budget.reserve(15, "third"))
    assert gauge._value.get() == 0
    with budget.reserve(75, "greedy"), budget.reserve(25, "other"):
        assert gauge._value.get() == 100


def test_of_two_greedy_tenants_each_gets_as_much() -> None:
    """And there is still room for a third."""
    budget, _ = _in_flight(700)
    taken = {"a": 0, "b": 0}
    with ExitStack() as held:
        for _ in range(700):
            for who in taken:
                with suppress(WireError):
                    held.enter_context(budget.reserve(1, who))
                    taken[who] += 1
        assert taken == {"a": 300, "b": 300}


def test_a_body_larger_than_the_limit_is_taken_alone() -> None:
    """Else a limit that is too small would refuse it for ever."""
    budget, _ = _in_flight(10)
    with budget.reserve(50, "a"):
        _refused(budget, 1)


def test_an_exception_gives_the_room_back() -> None:
    """A batch that is refused later does not count for ever."""
    budget, gauge = _in_flight(100)
    with pytest.raises(ValueError, match="x"), budget.reserve(60, "a"):
        raise ValueError("x")
    assert gauge._value.get() == 0


def test_the_pause_doubles_with_each_refusal_and_starts_anew() -> None:
    """6 s, 12 s, … 96 s at most; for each stream by itself."""
    budget, _ = _in_flight(100)
    with budget.reserve(100, "x"):
        assert [_refused(budget, 1) for _ in range(6)] == [6, 12, 24, 48, 96, 96]
        assert _refused(budget, 1, "b") == 6
    with budget.reserve(1, "a"):
        pass
    with budget.reserve(100, "x"):
        assert _refused(budget, 1) == 6


def test_pauses_are_spread() -> None:
    """Those who are refused together do not come again together."""
    found = [jitter() for _ in range(200)]
    assert 0.5 <= min(found) < 0.8
    assert 1.2 < max(found) <= 1.5


def test_a_tenant_has_a_number_of_requests_per_second(tmp_path: Path) -> None:
    """A burst of two seconds' worth, then as many as come back; other tenants are not touched."""
    now = [0.0]
    rates = TenantRates(settings(tmp_path, tenant_requests_per_s=5.0), lambda: now[0])
    for _ in range(10):
        rates.take("a", 1)
    with pytest.raises(WireError) as caught:
        rates.take("a", 1)
    assert caught.value.problem == Problem.RATE_LIMITED
    assert caught.value.retry_after_s == pytest.approx(0.2)
    rates.take("b", 1)
    now[0] += 0.2
    rates.take("a", 1)
    with pytest.raises(WireError):
        rates.take("a", 1)


def test_a_tenant_has_a_number_of_events_per_second(tmp_path: Path) -> None:
    """A batch larger than the bucket passes, and is paid off before the next."""
    now = [0.0]
    rates = TenantRates(settings(tmp_path, tenant_events_per_s=100.0), lambda: now[0])
    rates.take("a", 1000)
    with pytest.raises(WireError) as caught:
        rates.take("a", 1)
    assert caught.value.retry_after_s == pytest.approx(8.01)
    now[0] += 8.02
    rates.take("a", 1)


def test_without_limits_everything_passes(tmp_path: Path) -> None:
    """0 is no limit."""
    rates = TenantRates(settings(tmp_path), lambda: 0.0)
    for _ in range(1000):
        rates.take("a", 10**9)
