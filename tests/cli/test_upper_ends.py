"""Options that once had a lower end alone: beyond the upper one they are refused in one line."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Cli, one_line_of

BALANCE = ("balance", "--experts", "16", "--gpus", "8", "--ep", "4", "--micro-batches", "2", "--assignments", "4096")
CHUNKS = ("chunks", "mixtral-8x7b", "h100-hgx", "--gpus", "8", "--strategy", "ep=4")
PLAN = ("plan", "llama3-8b", "h100-hgx", "--gpus", "8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*BALANCE, "--capacity-factor", "1e308"), "capacity factor (1e+308) must be above 0 and at most 1024"),
        (
            (*BALANCE, "--threshold", "1e308"),
            "threshold (1e+308) must be at least 1, the mean itself, and at most 1024",
        ),
        ((*CHUNKS, "--headroom", "1e308"), "headroom (1e+308) from 1 to 1024"),
        ((*CHUNKS, "--headroom", "nan"), "headroom (nan) from 1 to 1024"),
        ((*PLAN, "--refine-seconds", "1e308"), "--refine-seconds: must be at most 86400"),
        (("validate", "--processes", "99999999999"), "--processes: must be at most 1024"),
        (("measure", "x.yaml", "--timeout", "9" * 30), "--timeout: must be at most 604800"),
    ],
)
def test_beyond_the_upper_end(cli: Cli, arguments: tuple[str, ...], said: str) -> None:
    done = cli(*arguments)
    assert done.returncode == 2, done.stderr
    assert said in one_line_of(done.stderr)
