"""What computing loses beside communication: inside a domain what layers lost, between domains by multiprocessors held.

Collectives between domains have four channels for each rank of one, sixteen at most; a peer has two, or one. They cost
besides what they move.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from mofa.cost.kernels.collectives import Fabric
from mofa.cost.kernels.computing_slowdown import collective_slowdown, send_slowdown
from mofa.cost.kernels.topology import ProcessGroup
from mofa.cost.kernels.toy_gpu import toy_gpu
from mofa.specs.base import Fact
from mofa.specs.curves import GpuCurves

INSIDE = 0.1
"""Of the toy GPU. [-]"""
SLOW_NETWORK = Fabric(
    intra_bytes_per_s=400e9, intra_all_to_all_bytes_per_s=400e9, inter_bytes_per_s=0.0, inter_all_to_all_bytes_per_s=0.0
)
"""On which channels between domains hold their multiprocessors and move next to nothing."""
RAILS = replace(SLOW_NETWORK, inter_bytes_per_s=50e9)
"""A card a GPU: the rings of eight carry as much as those inside a domain."""
MEASURED = {1: 0.01, 2: 0.02, 4: 0.04, 8: 0.06, 16: 0.14}


def curves_with(measured: Mapping[int, float]) -> GpuCurves:
    """The toy GPU's curves where layers lose so much beside so many held multiprocessors."""
    facts = {number: Fact(value=value, provenance="assumed", source="an example") for number, value in measured.items()}
    return toy_gpu().curves.model_copy(update={"slowdown_by_held_multiprocessors": facts})


def groups(*sizes: tuple[int, int]) -> ProcessGroup:
    """Groups of so many ranks, so many of them in each domain."""
    size, inside = np.array(sizes).T
    return ProcessGroup(size, inside, inside)


def test_a_collective_inside_a_domain_costs_what_layers_lost_beside_one() -> None:
    assert collective_slowdown(curves_with(MEASURED), groups((2, 2), (8, 8)), SLOW_NETWORK) == pytest.approx(
        [INSIDE, INSIDE]
    )


def test_a_collective_between_domains_costs_what_its_channels_hold() -> None:
    """One, two and eight ranks a domain have 4, 8 and 16 channels."""
    slowdown = collective_slowdown(curves_with(MEASURED), groups((8, 1), (8, 2), (64, 8)), SLOW_NETWORK)
    assert slowdown == pytest.approx([0.04, 0.06, 0.14])


def test_between_measured_numbers_it_is_interpolated() -> None:
    """Three ranks a domain have 12 channels, in the middle of 8 and 16."""
    assert collective_slowdown(curves_with(MEASURED), groups((6, 3)), SLOW_NETWORK) == pytest.approx(
        [(0.06 + 0.14) / 2]
    )


def test_beyond_the_measured_numbers_it_is_the_nearest() -> None:
    """Measured at 6 and 10: 4 channels cost what 6 do, 16 what 10 do."""
    slowdown = collective_slowdown(curves_with({10: 0.3, 6: 0.2}), groups((8, 1), (64, 8)), SLOW_NETWORK)
    assert slowdown == pytest.approx([0.2, 0.3])


def test_each_strategy_has_its_own() -> None:
    """A group inside a domain, one between domains, and one of a single rank."""
    assert collective_slowdown(curves_with(MEASURED), groups((8, 8), (16, 8), (1, 1)), SLOW_NETWORK) == pytest.approx(
        [INSIDE, 0.14, INSIDE]
    )


def test_a_send_between_domains_holds_one_or_two_channels() -> None:
    """Stages one a domain: eight have two channels a peer, sixteen one. Within a domain sends cost what layers lost."""
    slowdown = send_slowdown(curves_with(MEASURED), groups((8, 1), (16, 1), (4, 4)))
    assert slowdown == pytest.approx([0.02, 0.01, INSIDE])


def test_where_it_was_not_measured_every_group_costs_what_layers_lost() -> None:
    some = groups((8, 8), (16, 8), (8, 1))
    assert collective_slowdown(curves_with({}), some, RAILS) == pytest.approx([INSIDE] * 3)
    assert send_slowdown(curves_with({}), some) == pytest.approx([INSIDE] * 3)


def test_rings_through_a_domain_cost_as_much_more_as_they_move_inside() -> None:
    """One rank a domain has its port alone; two send one ring's bytes to each other, eight those of seven. 24 channels
    inside cost 0.14 of the 0.2 there, what they move the rest."""
    curves = curves_with(MEASURED)
    curves = curves.model_copy(update={"overlap_slowdown": Fact(value=0.2, provenance="assumed", source="an example")})
    slowdown = collective_slowdown(curves, groups((8, 1), (8, 2), (64, 8), (8, 8)), RAILS)
    assert slowdown == pytest.approx([0.04, 0.06 + 0.06 / 8, 0.14 + 0.06 * 7 / 8, 0.2])
    assert send_slowdown(curves, groups((8, 1))) == pytest.approx([0.02])
    capped = replace(RAILS, communicator_bytes_per_s=100e9)
    assert collective_slowdown(curves, groups((64, 8)), capped) == pytest.approx([0.14 + 0.06 / 4])


def test_an_all_to_all_between_domains_has_no_ring_through_them() -> None:
    """It holds its channels; inside a domain it costs what layers lost beside a collective."""
    curves = curves_with(MEASURED)
    curves = curves.model_copy(update={"overlap_slowdown": Fact(value=0.2, provenance="assumed", source="an example")})
    slowdown = collective_slowdown(curves, groups((8, 1), (64, 8), (8, 8)), RAILS, "all_to_all")
    assert slowdown == pytest.approx([0.04, 0.14, 0.2])


def test_moving_gives_nothing_back_where_holding_costs_more() -> None:
    """The toy GPU's layers lose less inside than 24 held multiprocessors cost."""
    assert collective_slowdown(curves_with(MEASURED), groups((64, 8)), RAILS) == pytest.approx([0.14])
