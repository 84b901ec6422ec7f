"""How many rows an expert's capacity is, where Megatron-Core pads its rows to it.

Read in megatron_core 0.16.1 (transformer/moe/moe_utils.py, ``get_capacity``; token_dispatcher.py).
"""

from __future__ import annotations

from mofa.blocks.elementwise import FloatK, rounded


def capacity_rows(copies: FloatK, num_experts: int, capacity_factor: float) -> FloatK:
    """Rows of one source rank that an expert takes at most: whole ones, rounded up.

    Parameters
    ----------
    copies
        Tokens of a rank times the experts that each chooses. (K,) [tokens]
    num_experts
        Of the layer. [-]
    capacity_factor
        Capacity of an expert over an even share. [-]

    Returns
    -------
    FloatK
        (K,) [tokens]

    Examples
    --------
    >>> capacity_rows(4096.0 * 8, 128, 1.0), capacity_rows(100.0 * 2, 64, 1.25)
    (256.0, 4.0)
    """
    return rounded(copies / num_experts * capacity_factor, up=True)


def padded_rows_over_copies(copies: FloatK, num_experts: int, capacity_factor: float) -> FloatK:
    """Rows that a rank sends, all experts' rows padded to whole capacities, over its copies of tokens. (K,) [-]

    Examples
    --------
    >>> padded_rows_over_copies(100.0 * 2, 64, 1.25)
    1.28
    """
    return capacity_rows(copies, num_experts, capacity_factor) * num_experts / copies
