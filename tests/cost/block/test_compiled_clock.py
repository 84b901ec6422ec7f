"""The compiled clocks of a tape against their reference, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from mofa.cost.block import compiled_clock, tape_clock
from mofa.cost.block.compiled_clock import c_library
from mofa.cost.block.tape_clock import TapeTime, time_per_tape_repetition
from tests.compile_part import compiled_anew
from tests.cost.block.test_tape_clock import NUM_K, machine, random_tape, tape, timed


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        compiled_anew(compiled_clock, tmp_path_factory.mktemp("compiled"), patch)
        yield
    c_library.cache_clear()


@pytest.mark.parametrize("repeat", [1, 2, 3])
def test_random_tapes(repeat: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With synchronisations, communicators that some share, ops that some lack, and what carries over."""
    assert c_library() is not None
    for seed in range(40):
        ops, times = random_tape(np.random.default_rng(3000 + seed), carries=seed % 2 == 0)
        with timed(times):
            compiled = time_per_tape_repetition(tape(*ops), machine(NUM_K), repeat)
            with monkeypatch.context() as patch:
                patch.setattr(tape_clock, "c_library", lambda: None)
                reference = time_per_tape_repetition(tape(*ops), machine(NUM_K), repeat)
        for name in TapeTime.__dataclass_fields__:
            assert np.array_equal(getattr(compiled, name), getattr(reference, name)), (seed, name)
