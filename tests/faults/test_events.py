"""Logs of failures: what they say, and what is refused with its row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mofa.errors import SpecError
from mofa.faults.failures.events import read_failure_log
from mofa.faults.failures.from_log import fault_profile_with_log
from mofa.specs.faults import FaultSpec
from mofa.specs.load import load_faults

GOOD = "node,time,kind,until\nn1,2025-01-01T00:00:00,gpu,2025-01-01T12:00:00\nn2,2025-01-03T00:00:00,nic,\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "log.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_rate_of_a_log_by_hand(tmp_path: Path) -> None:
    log = read_failure_log(write(tmp_path, GOOD))
    found = log.failure_rate(num_nodes=4, days=10)
    assert found.node_days == pytest.approx(39.5)  # half a day down
    assert found.rate_per_node_day == pytest.approx(2 / 39.5)
    assert log.failure_kind_shares() == {"gpu": 0.5, "nic": 0.5}
    unwatched = log.failure_rate(num_nodes=4)  # the first failure begins the record
    assert unwatched.failures == 1
    assert unwatched.node_days == pytest.approx(7.5)
    assert log.weibull_shape() is None


def test_seconds_and_columns_in_any_order(tmp_path: Path) -> None:
    log = read_failure_log(write(tmp_path, "kind,node,time\nprocess,a,0\nnode,b,86400\n"))
    assert log.times_s.tolist() == [0.0, 86400.0]
    assert np.isnan(log.until_s).all()


def test_a_shape_is_found_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    rows = []
    for node in range(200):
        at = np.cumsum(rng.weibull(0.7, 40) * 1e5)
        rows += [(float(t), f"n{node}") for t in at[at < 1.5e6]]
    text = "node,time,kind\n" + "".join(f"{n},{t},gpu\n" for t, n in sorted(rows))
    assert read_failure_log(write(tmp_path, text)).weibull_shape() == pytest.approx(0.7, abs=0.04)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node,time,kind\n", "holds no failure"),
        ("", "has no column node"),
        ("node,when,kind\na,1,gpu\n", "has no column time"),
        ("node,time,kind,colour\na,1,gpu,red\n", "has colour"),
        ("node,time,kind\na,yesterday,gpu\n", r"row 1: time \(yesterday\) is no time"),
        ("node,time,kind\na,nan,gpu\n", "row 1: time .*not finite"),
        ("node,time,kind\na,2,gpu\nb,1,gpu\n", "row 2: time .*before the row above"),
        ("node,time,kind\na,1,gpu\nb,2025-01-01,gpu\n", "mixes"),
        ("node,time,kind,until\na,1,gpu,9\na,5,gpu,10\n", "row 2: a fails while it is still down"),
        ("node,time,kind,until\na,5,gpu,1\n", "row 1: until"),
        ("node,time,kind\n,1,gpu\n", "row 1: node is empty"),
        ("node,time,kind\na,1\n", "row 1: kind is empty"),
        ("node,time,kind\na,1,gpu,x,y\n", "row 1 has more cells"),
        ("node,time,kind\na,2025-01-01T00:00:00,gpu\nb,2025-01-02T00:00:00Z,gpu\n", "mixes"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        read_failure_log(write(tmp_path, text))


def test_what_a_log_cannot_say_is_refused(tmp_path: Path) -> None:
    log = read_failure_log(write(tmp_path, GOOD))
    with pytest.raises(SpecError, match=r"fewer than the 2"):
        log.failure_rate(1, 10)
    with pytest.raises(SpecError, match=r"shorter than the log's 2 days"):
        log.failure_rate(4, 1)
    with pytest.raises(SpecError, match="at one time"):
        read_failure_log(write(tmp_path, "node,time,kind\na,1,gpu\n")).failure_rate(4)
    with pytest.raises(SpecError, match="no such file"):
        read_failure_log(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"node,time,kind\n\xff,1,gpu\n")
    with pytest.raises(SpecError, match="not UTF-8"):
        read_failure_log(tmp_path / "bytes.csv")


def clustered(folder: Path, *, kinds: tuple[str, ...] = ("node", "network", "node", "process")) -> Path:
    rng = np.random.default_rng(5)
    rows = [(float(t), f"n{n}") for n in range(60) for t in np.cumsum(rng.weibull(0.6, 20) * 1e5) if t < 2e6]
    lines = [f"{node},{at},{kinds[i % len(kinds)]}" for i, (at, node) in enumerate(sorted(rows))]
    return write(folder, "node,time,kind\n" + "\n".join(lines) + "\n")


def test_a_log_in_a_profiles_place(tmp_path: Path) -> None:
    log = read_failure_log(clustered(tmp_path))
    preset = load_faults("llama3")
    found = fault_profile_with_log(preset, log, 64, days=30).reliability
    assert found is not None and found.failures_per_node_day is not None and found.counted_failures is not None
    assert found.failures_per_node_day.value == pytest.approx(len(log) / (64 * 30))
    assert found.counted_failures.value == len(log)
    shares = {kind.name: kind.share.value for kind in found.kinds}
    assert shares == pytest.approx({"hardware of a node": 0.5, "network": 0.25, "software": 0.25}, abs=0.01)
    assert (
        found.shape is not None and found.shape.value == pytest.approx(log.weibull_shape()) and found.shape.value < 0.8
    )
    assert all(kind.share.provenance == "measured" and "a log of" in kind.share.source for kind in found.kinds)


def test_failures_like_clockwork_have_no_shape(tmp_path: Path) -> None:
    rows = "".join(f"a,{i * 1000},node\n" for i in range(40))
    assert read_failure_log(write(tmp_path, "node,time,kind\n" + rows)).weibull_shape() is None
    nearly = "".join(f"a,{i * 1000 + (i == 7) * 1e-3},node\n" for i in range(40))
    log = read_failure_log(write(tmp_path, "node,time,kind\n" + nearly))
    assert log.weibull_shape() == 1e3
    found = fault_profile_with_log(load_faults("llama3"), log, 1, days=1).reliability
    assert found is not None and found.shape is not None and found.shape.value == 10.0


def test_kinds_of_a_log_by_name_and_by_path(tmp_path: Path) -> None:
    one = read_failure_log(write(tmp_path, "node,time,kind\na,0,Software\nb,86400,network\n"))
    found = fault_profile_with_log(load_faults("llama3"), one, 8, days=2).reliability
    assert found is not None and [kind.share.value for kind in found.kinds] == [0.0, 0.5, 0.5]
    assert found.shape is None
    odd = read_failure_log(write(tmp_path, "node,time,kind\na,0,gpu\n"))
    with pytest.raises(SpecError, match="kind gpu is none of llama3's; write one of hardware of a node, network"):
        fault_profile_with_log(load_faults("llama3"), odd, 8, days=2)
    with pytest.raises(SpecError, match=r"--log: its rate: is .* failures per node-day; give 1e-09 to 1e[+]09"):
        fault_profile_with_log(load_faults("llama3"), one, 10**6, days=1e6)
    with pytest.raises(SpecError, match="has no reliability"):
        fault_profile_with_log(FaultSpec(name="bare", source="a test"), odd, 8, days=2)
