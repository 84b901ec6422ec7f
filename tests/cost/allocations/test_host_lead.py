"""How far a host is ahead of its device."""

from __future__ import annotations

from mofa.cost.allocations.host_lead import host_lead_launches
from mofa.cost.allocations.watchdog import QUEUE


def test_what_was_sent_comes_back_once_the_device_is_as_far() -> None:
    """Twice as slow as its host, a device is behind by as many launches as there were, and never by more than 1,024."""
    assert [host_lead_launches(launched, 2.0) for launched in (0.0, 300.0, 5000.0)] == [0.0, 300.0, QUEUE]
    assert host_lead_launches(300.0, 0.9) == 0.0
