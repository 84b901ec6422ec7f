"""Time of a tape by hand, and against a slow twin: one candidate, one op after the other, plain numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from mofa.blocks.elementwise import where
from mofa.blocks.op import COMPUTING_FAMILIES, Op, Tape, Tensor
from mofa.blocks.work import Collective, Gemm, HostSync, MemoryBound
from mofa.cost.block.communication_beside import HIDDEN
from mofa.cost.block.streams import OWN_ORDER
from mofa.cost.block.tape_clock import EXPOSED, TapeTime, time_per_tape_repetition
from mofa.cost.kernels.slowest_gpu import StragglerFractions

SLOWDOWN, SYNC_S, LOAD_S = 0.1, 20.0, 2.0
GEMM = Gemm(1, 1, 1)
FABRIC = SimpleNamespace(inter_bytes_per_s=1.0, intra_bytes_per_s=1.0, communicator_bytes_per_s=1.0)
"""No group leaves its domain."""


SHARED = np.array([False, True, False, True])


def shared(num_k: int) -> Any:
    """Which candidates' groups span all ranks and so share one communicator: every other one."""
    return np.resize(SHARED, num_k)


def in_one_domain(num_k: int) -> Any:
    """What is asked of a group of two ranks beside each other."""
    two = np.full(num_k, 2)
    return SimpleNamespace(size=two, ranks_per_domain=two, crosses_domains=np.zeros(num_k, dtype=bool))


def machine(num_k: int = 1, slowdown: float = SLOWDOWN, blocking: bool = False) -> Any:
    """All that the scan asks of a machine but the times of ops."""
    curves = SimpleNamespace(
        overlap_slowdown=SimpleNamespace(value=slowdown),
        slowdown_by_held_multiprocessors={},
        host=SimpleNamespace(kernel_load_s=SimpleNamespace(value=LOAD_S)),
    )
    cluster = SimpleNamespace(gpu=SimpleNamespace(curves=curves), sync_s=SYNC_S)
    groups = defaultdict(lambda: in_one_domain(num_k))
    return SimpleNamespace(
        num_k=num_k, cluster=cluster, groups=groups, network_fabric=FABRIC,
        slowest_host_factor=1.0, host_lead_lost=False,
        uses_world_communicator=lambda _: shared(num_k),
        framework=SimpleNamespace(launch_blocking=blocking),
    )  # fmt: skip


Times = dict[str, tuple[Any, Any]]


@contextmanager
def timed(times: Times) -> Iterator[None]:
    """Ops take the seconds (device, host) that are listed under their names, where they are present."""

    def device_seconds(ops: tuple[Op, ...], m: Any, timed: Any = None) -> Any:
        return column(0)(ops, m), StragglerFractions(0.0, 0.0)

    def column(index: int) -> Any:
        def seconds(ops: tuple[Op, ...], m: Any, timed: Any = None) -> Any:
            return [where(op.present, times.get(op.name, (0.0, 0.0))[index], 0.0) for op in ops]

        return seconds

    with (
        patch("mofa.cost.block.tape_clock.device_seconds_and_stragglers", device_seconds),
        patch("mofa.cost.block.tape_clock.issue_seconds", column(1)),
    ):
        yield


def op(
    name: str, reads: str = "", *, family: Any = "gemm", work: Any = GEMM, stream: str = "compute", **more: Any
) -> Op:
    """An op that writes a tensor of its name."""
    return Op(name, family, work, tuple(reads.split()), (name,), stream=stream, **more)


def send(name: str, reads: str = "", stream: str = "comm", group: str = "", **more: Any) -> Op:
    """A collective of the group of its stream, unless said."""
    work = Collective("all_gather", group or stream, 1.0)
    return op(name, reads, family="tp", work=work, stream=stream, **more)


def sync(**more: Any) -> Op:
    return Op("sync", "host", HostSync(), **more)


def tape(*ops: Op) -> Tape:
    names = {n for o in ops for n in (*o.reads, *o.writes)} | {"x"}
    return Tape(ops, {n: Tensor(n, 1.0) for n in names}, ("x",), ())


def run(times: Times, *ops: Op, num_k: int = 1, repeat: int = 2, slowdown: float = SLOWDOWN) -> TapeTime:
    with timed(times):
        return time_per_tape_repetition(tape(*ops), machine(num_k, slowdown), repeat)


def parts(time: TapeTime, k: int = 0) -> dict[str, float]:
    return {name: float(v) for name, v in zip(EXPOSED, time.exposed[:, k], strict=True) if abs(v) > 1e-12}


def test_a_synchronisation_waits_for_what_it_reads_of_another_stream() -> None:
    """The host goes on 20 s after ``a`` at 2 s, with 78 s of ``b`` left, in which it issues ``c``; else it waits for
    ``b``."""
    times: Times = {"a": (2.0, 1.0), "copy": (0.0, 1.0), "b": (100.0, 1.0), "c": (1.0, 5.0)}
    ops = (op("a", "x"), send("copy", "a", stream="to_host"), op("b", "a"))
    whole = run(times, *ops, sync(), op("c", "b"), repeat=1)
    assert parts(whole)["host_idle"] == pytest.approx(1.0 + SYNC_S + 5.0)
    apart = run(times, *ops, sync(reads=("copy",)), op("c", "b"), repeat=1)
    assert parts(apart)["host_idle"] == pytest.approx(1.0)


def test_empty_tape_takes_no_time() -> None:
    assert run({}).total_s.tolist() == [0.0]


def test_host_bound_tape_takes_the_sum_of_issue_times() -> None:
    """Four ops of 1 s, issued in 5 s each: the device waits 16 of 20 s."""
    time = run(dict.fromkeys("abcd", (1.0, 5.0)), op("a", "x"), op("b", "a"), op("c", "b"), op("d", "c"))
    assert parts(time) == pytest.approx({"gemm": 4.0, "host_idle": 16.0})
    assert time.issue.tolist() == [20.0]


def test_a_host_that_awaits_a_copy_leaves_the_device_what_was_issued_behind_it() -> None:
    """Counts are computed at 3 s and copied by 4 s; the host goes on at 24 s and issues the next op by 29 s, while 30 s
    of an op behind the counts still run to 33 s. A wait for all of the device lasts until 53 s: it idles 25 s more."""
    ops = (op("counts", "x"), op("copy", "counts", family="memory_bound", work=MemoryBound(1.0), stream="to_host"))
    ops = (*ops, op("permute", "x"))
    times = {"counts": (2.0, 1.0), "copy": (1.0, 0.0), "permute": (30.0, 1.0), "next": (1.0, 5.0)}
    counted = Op("sync", "host", HostSync(), ("copy",))
    time = run(times, *ops, counted, op("next", "permute"), repeat=1)
    assert parts(time) == pytest.approx({"gemm": 33.0, "host_idle": 1.0})
    time = run(times, *ops, sync(), op("next", "permute"), repeat=1)
    assert parts(time) == pytest.approx({"gemm": 33.0, "host_idle": 26.0})


def test_device_bound_tape_takes_the_sum_of_durations() -> None:
    time = run(dict.fromkeys("abcd", (7.0, 5.0)), op("a", "x"), op("b", "a"), op("c", "b"), op("d", "c"))
    assert parts(time) == pytest.approx({"gemm": 28.0})


def test_the_lead_of_a_long_op_carries_small_ones() -> None:
    """30 s of one product against 4 issues of 5 s: the three small ops after it are issued by the time it ends."""
    times = {"a": (30.0, 5.0), "b": (1.0, 5.0), "c": (1.0, 5.0), "d": (1.0, 5.0)}
    ops = op("a", "x"), op("b", "a"), op("c", "b"), op("d", "c")
    assert parts(run(times, *ops)) == pytest.approx({"gemm": 33.0})
    from_rest = run(times, *ops, repeat=1)  # but the first op of all waits for its own issue
    assert parts(from_rest) == pytest.approx({"gemm": 33.0, "host_idle": 5.0})


def test_a_host_without_a_lead_is_waited_for_where_its_issue_is_behind() -> None:
    """8 s of issue for 1 s of computing, then 1 s for 10 s: 11 s on the device and 9 s on the host, but 19 s where both
    begin together. The other way round the device waits for the 8 s behind 1 + 10 s of computing no more."""
    times = {"launches": (1.0, 8.0), "computes": (10.0, 1.0)}
    small_first = run(times, op("launches"), op("computes")).clocks[:, 0]
    large_first = run(times, op("computes"), op("launches")).clocks[:, 0]
    assert small_first.tolist()[:2] + small_first.tolist()[3:4] == pytest.approx([11.0, 19.0, 9.0])
    assert large_first.tolist()[:2] + large_first.tolist()[3:4] == pytest.approx([11.0, 12.0, 9.0])


def test_a_host_synchronisation_loses_the_lead() -> None:
    """3 x 10 s; then the host needs 20 s to wake and 2 s to issue the next op, during which the device idles."""
    time = run(dict.fromkeys("abc", (10.0, 2.0)), op("a", "x"), op("b", "a"), op("c", "b"), sync())
    assert parts(time) == pytest.approx({"gemm": 30.0, "host_idle": 22.0})
    absent = run(dict.fromkeys("abc", (10.0, 2.0)), op("a", "x"), op("b", "a"), op("c", "b"), sync(present=False))
    assert parts(absent) == pytest.approx({"gemm": 30.0})


def test_a_collective_overlaps_exactly_what_runs_beside_it() -> None:
    """8 s of communication beside 5 s of computing, slowed by a tenth: who is 0.5 s later waits 0.5 s less, 3 s in all
    are lost; beside 9 s of computing nothing is awaited and 8 s slow it."""
    times = {"a": (10.0, 0.0), "send": (8.0, 0.0), "beside": (5.0, 0.0), "after": (2.0, 0.0)}
    ops = op("a", "x"), send("send", "a"), op("beside", "a"), op("after", "send beside")
    time = run(times, *ops)
    assert parts(time) == pytest.approx({"gemm": 17.0, "tp": 3.0})
    assert time.hidden[HIDDEN.index("tp")].tolist() == pytest.approx([5.0])
    assert float(time.total_s[0]) == pytest.approx(20.0)
    time = run({**times, "beside": (9.0, 0.0)}, *ops)
    assert parts(time) == pytest.approx({"gemm": 21.0, "tp": 0.8})


def test_a_collective_that_nothing_runs_beside_is_all_exposed() -> None:
    times = {"a": (10.0, 0.0), "send": (8.0, 0.0), "after": (2.0, 0.0)}
    for stream in ("comm", "compute"):
        time = run(times, op("a", "x"), send("send", "a", stream), op("after", "send"))
        assert parts(time) == pytest.approx({"gemm": 12.0, "tp": 8.0})
        assert not np.any(time.hidden)


def test_collectives_of_one_stream_or_of_one_communicator_queue() -> None:
    """Two of 6 s: together from two streams over two communicators, else one after the other (NVIDIA/nccl issue 574).
    The second candidate's groups both span all ranks, which leaves them one communicator."""
    times = {"a": (1.0, 0.0), "one": (6.0, 0.0), "two": (6.0, 0.0), "after": (1.0, 0.0)}
    for stream, group, waited in (("comm", "a", 12.0), ("other", "a", 12.0), ("other", "b", 6.0), ("comm", "b", 12.0)):
        ops = op("a", "x"), send("one", "a", group="a"), send("two", "a", stream, group), op("after", "one two")
        time = run(times, *ops, slowdown=0.0, num_k=2)
        assert parts(time)["tp"] == pytest.approx(waited)
        assert parts(time, 1)["tp"] == pytest.approx(12.0)


def test_a_copy_on_another_stream_takes_from_computing_what_it_takes() -> None:
    """8 s of collective slow 10 s of computing by a tenth of what is beside it, 2 s of memory-bound kernels by 2 s."""
    times = {"a": (10.0, 0.0), "send": (8.0, 0.0), "copy": (2.0, 0.0), "after": (1.0, 0.0)}
    copy = op("copy", work=MemoryBound(1.0), family="dp", stream="aside")
    time = run(times, send("send"), copy, op("a", "x"), op("after", "send copy a"))
    assert parts(time) == pytest.approx({"gemm": 11.0, "tp": 0.8, "dp": 2.0})


def test_a_collective_starts_when_its_input_is_there() -> None:
    """Issued at once, it waits for the product that it sends: nothing is hidden behind that product."""
    times = {"long": (50.0, 0.0), "send": (8.0, 0.0), "after": (1.0, 0.0)}
    time = run(times, op("long", "x"), send("send", "long"), op("after", "send"))
    assert parts(time)["tp"] == pytest.approx(8.0)


def test_a_gather_for_the_next_repetition_is_hidden() -> None:
    """Prefetch: read before it is written, the tensor comes from the repetition before."""
    times = {"use": (10.0, 0.0), "gather": (8.0, 0.0)}
    time = run(times, send("gather"), op("use", "w x"), op("w", "gather", work=None))
    assert parts(time)["gemm"] == 10.0


def test_absent_ops_cost_nothing_and_pass_readiness_through() -> None:
    """Where the op between is absent, the one behind waits for what it would have read, beside what ran meanwhile."""
    times = {"a": (10.0, 1.0), "send": (8.0, 0.0), "between": (4.0, 1.0), "beside": (3.0, 0.0), "after": (2.0, 0.0)}
    between = op("between", "send", present=np.array([True, False]))
    time = run(
        times,
        op("a", "x"),
        send("send", "a"),
        between,
        op("beside", "a"),
        op("after", "between"),
        num_k=2,
        slowdown=0.0,
    )
    assert parts(time, 0) == pytest.approx({"gemm": 19.0, "tp": 8.0})
    assert parts(time, 1) == pytest.approx({"gemm": 15.0, "tp": 5.0})
    assert time.issue.tolist() == [2.0, 1.0]


def test_a_view_waits_for_nothing_itself() -> None:
    times = {"a": (10.0, 0.0), "send": (8.0, 0.0), "beside": (3.0, 0.0), "after": (2.0, 0.0)}
    view = op("view", "send", work=None)
    time = run(times, op("a", "x"), send("send", "a"), view, op("beside", "a"), op("after", "view"), slowdown=0.0)
    assert parts(time) == pytest.approx({"gemm": 15.0, "tp": 5.0})


def test_an_op_that_some_candidates_lack_is_awaited_where_it_runs() -> None:
    """gather, then a product on what it brought, then the product is sent: the send begins when the product ends."""
    times = {"gather": (8.0, 0.0), "product": (10.0, 0.0), "send": (5.0, 0.0), "end": (1.0, 0.0)}
    product = op("product", "gather", present=np.array([True, False]))
    ops = send("gather", "x"), product, send("send", "product", "other"), op("end", "send")
    time = run(times, *ops, num_k=2, slowdown=0.0)
    assert parts(time, 0) == pytest.approx({"gemm": 11.0, "tp": 13.0})
    assert parts(time, 1) == pytest.approx({"gemm": 1.0, "tp": 13.0})


def test_an_absent_collective_hands_its_input_on() -> None:
    times = {"a": (10.0, 0.0), "first": (8.0, 0.0), "second": (5.0, 0.0), "after": (1.0, 0.0)}
    ops = (
        op("a", "x"),
        send("first", "a"),
        send("second", "first", "other", present=np.array([True, False])),
        op("after", "second"),
    )
    time = run(times, *ops, num_k=2)
    assert parts(time, 0)["tp"] == pytest.approx(13.0)
    assert parts(time, 1)["tp"] == pytest.approx(8.0)


class OneCandidate:
    """Host, streams and tensors of one candidate, moved on op by op; a host that is ``ahead`` is waited for nowhere."""

    def __init__(self, k: int, times: Times, slowdown: float, *, ahead: bool = False) -> None:
        self.k, self.times, self.slowdown, self.ahead = k, times, slowdown, ahead
        self.host, self.clocks, self.ready = 0.0, {"compute": 0.0}, dict[str, tuple[float, str]]()
        self.communicators = dict[str, float]()
        # what computing would have lost beside communication, and from which loss on streams and tensors don't move
        self.loss, self.since = 0.0, dict[str, float]()
        self.begin()

    def begin(self) -> None:
        """Begin a repetition: nothing of it is exposed or hidden yet."""
        self.exposed, self.busy = dict.fromkeys(EXPOSED, 0.0), dict.fromkeys(HIDDEN, 0.0)
        self.regained = dict.fromkeys(HIDDEN, 0.0)

    def at(self, value: Any) -> Any:
        return np.broadcast_to(np.asarray(value), (NUM_K,))[self.k]

    def play(self, o: Op) -> None:
        present = bool(self.at(o.present))
        device, issue = (float(self.at(v)) for v in self.times.get(o.name, (0.0, 0.0)))
        if isinstance(o.work, HostSync):
            waits = present and not self.ahead
            self.host = max(self.host, self.clocks["compute"]) + SYNC_S if waits else self.host
            return
        self.host += issue if present and not self.ahead else 0.0
        if not present or (o.work is None and o.stream == "compute"):
            for name in o.writes:
                self.ready[name] = self.ready.get(o.reads[0], (0.0, ""))
                self.since[name] = self.since.get(o.reads[0], np.inf)
            return
        if o.family in self.busy:
            self.busy[o.family] += device
        if o.stream == "compute":
            self.compute(o, device)
        else:
            self.communicate(o, device)
        for name in o.writes:
            self.ready[name] = (self.clocks[o.stream], "" if o.stream == "compute" else o.family)

    def compute(self, o: Op, device: float) -> None:
        """Wait for what is read of other streams and for the host, then compute."""
        for name in o.reads:
            when, family = self.ready.get(name, (0.0, ""))
            if family:
                late = max(when - self.clocks["compute"], 0.0)
                back = max(min(late, self.loss - self.since[name]), 0.0)
                self.exposed[family] += late
                self.regained[family] += back
                self.loss -= back
                self.clocks["compute"] += late
        if device > 0:
            self.exposed["host_idle"] += max(self.host - self.clocks["compute"], 0.0)
            self.clocks["compute"] = max(self.clocks["compute"], self.host)
        self.exposed[o.family] += device
        self.clocks["compute"] += device
        self.loss += self.slowdown * device
        self.since.update(dict.fromkeys(o.writes, np.inf))

    def communicate(self, o: Op, device: float) -> None:
        """Start behind what is read, the stream and the communicator, whichever is last."""
        group = "world" if bool(self.at(shared(NUM_K))) else o.work.group  # type: ignore[union-attr]
        launch = self.host if o.stream in OWN_ORDER else max(self.host, self.clocks["compute"])
        queues = [(self.ready[name][0], self.since.get(name, np.inf)) for name in o.reads if name in self.ready]
        queues += [(self.clocks.get(o.stream, 0.0), self.since.get(o.stream, 0.0))]
        queues += [(self.communicators.get(group, 0.0), self.since.get("@" + group, 0.0))]
        start, last = launch, self.loss
        for free, fixed in queues:
            if free > start:
                start, last = free, min(fixed, self.loss)  # what is computed moves with all that is lost
        last = max(last, self.loss - (start - launch))
        self.since.update(dict.fromkeys((o.stream, "@" + group, *o.writes), last))
        self.clocks[o.stream] = self.communicators[group] = start + device


def twin(ops: tuple[Op, ...], times: Times, k: int, repeat: int, slowdown: float) -> dict[str, dict[str, float]]:
    """The same rules for one candidate, op by op: what the last of ``repeat`` repetitions exposes and hides."""
    candidate, ahead = OneCandidate(k, times, slowdown), OneCandidate(k, times, slowdown, ahead=True)
    for each in (candidate, ahead):
        for _ in range(repeat):
            each.begin()
            for o in ops:
                each.play(o)
    exposed, busy = candidate.exposed, candidate.busy
    hidden = {name: max(busy[name] - exposed[name], 0.0) for name in HIDDEN}
    computing, total, alone = sum(exposed[name] for name in COMPUTING_FAMILIES), sum(exposed.values()), dict(exposed)
    lost = {  # of what runs beside computing or other waits, the share beside computing; but for what shortens waits
        name: slowdown * hidden[name] * computing / max(total - alone[name], 1e-12) - candidate.regained[name]
        for name in HIDDEN
    }
    spare = sum(max(-seconds, 0.0) for seconds in lost.values())  # waits for one family give back others' losses
    for name in HIDDEN:
        exposed[name] += max(max(lost[name], 0.0) - spare, 0.0)
        spare = max(spare - max(lost[name], 0.0), 0.0)
    for name in HIDDEN:  # what is not waited for under a host far ahead is the host's
        moved = max(min(alone[name] - ahead.exposed[name], exposed[name]), -exposed["host_idle"])
        exposed[name] -= moved
        exposed["host_idle"] += moved
        beside = busy[name] - alone[name]
        hidden[name] = max(hidden[name] + max(beside + moved, 0.0) - max(beside, 0.0), 0.0)
    return {"exposed": exposed, "hidden": hidden}


NUM_K = 4


def random_tape(rng: np.random.Generator, *, carries: bool) -> tuple[tuple[Op, ...], Times]:
    """Ops on three streams, some absent for some candidates, some views; every collective is awaited in the end."""
    # what comes first is computed: nothing of a repetition begins before the one before it has ended
    ops, times = [op("first", "x")], Times(first=(0.3, 0.2))
    names = ["first"]
    awaited = set[str]()
    for i in range(int(rng.integers(3, 25))):
        name = f"t{i}"
        present: Any = True if rng.random() < 0.6 else rng.random(NUM_K) < 0.6
        reads = tuple(dict.fromkeys(str(n) for n in rng.choice(names[-6:], int(rng.integers(1, 3)))))
        kind = rng.choice(["gemm", "stream", "view", "tp", "ep", "sync"], p=[0.3, 0.25, 0.1, 0.15, 0.15, 0.05])
        if kind == "sync":
            if carries:
                ops.append(sync(present=present))
            continue
        scale = rng.choice([0.2, 1.0, 5.0])
        times[name] = (scale * rng.random(NUM_K) * (rng.random(NUM_K) < 0.9), float(rng.random()))
        if kind in ("tp", "ep"):
            work = Collective("all_gather", kind if rng.random() < 0.8 else "tp", 1.0)
            stream = "comm-tp" if kind == "tp" else str(rng.choice(["comm-ep", *OWN_ORDER]))
            ops.append(Op(name, kind, work, reads[:1], (name,), stream=stream, present=present))
            awaited.add(name)
        elif kind == "view":
            times[name] = (0.0, 0.0)
            ops.append(op(name, reads[0], work=None, family="memory_bound"))
        else:
            of_kind: Any = GEMM if kind == "gemm" else MemoryBound(1.0)
            family = "gemm" if kind == "gemm" else "memory_bound"
            ops.append(op(name, " ".join(reads), work=of_kind, family=family, present=present))
        names.append(name)
    if carries and len(names) > 2:  # something is read that the repetition before wrote
        late = [o.writes[0] for o in ops if o.writes and o.present is True][-2:]
        ops.insert(0, op("early", " ".join(late) or "x"))
        times["early"] = (0.5, 0.3)
    ops.append(op("end", " ".join(sorted(awaited) or ["first"])))
    times["end"] = (0.5, 0.1)
    return tuple(ops), times


def check_against_twin(ops: tuple[Op, ...], times: Times, repeat: int) -> None:
    time = run(times, *ops, num_k=NUM_K, repeat=repeat)
    for k in range(NUM_K):
        slow = twin(ops, times, k, repeat, SLOWDOWN)
        np.testing.assert_allclose(time.exposed[:, k], list(slow["exposed"].values()), atol=1e-9)
        np.testing.assert_allclose(time.hidden[:, k], list(slow["hidden"].values()), atol=1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_slow_twin(seed: int) -> None:
    """From rest, and in the second repetition where one depends on the one before."""
    rng = np.random.default_rng(seed)
    check_against_twin(*random_tape(rng, carries=False), repeat=1)
    tape_, times = random_tape(rng, carries=True)
    check_against_twin((*tape_, sync()), times, repeat=2)


@pytest.mark.parametrize("seed", range(20))
def test_slow_twin_in_the_steady_state(seed: int) -> None:
    """Where only the host's lead carries over: the device after many repetitions, without the slowdown."""
    ops, times = random_tape(np.random.default_rng(1000 + seed), carries=False)
    time = run(times, *ops, num_k=NUM_K, slowdown=0.0)
    for k in range(NUM_K):
        last = sum(twin(ops, times, k, 80, 0.0)["exposed"].values())
        assert float(time.total_s[k]) == pytest.approx(last, abs=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_exposed_is_what_the_compute_stream_takes(seed: int) -> None:
    """Nothing is negative, the parts sum to the total, which neither host nor device alone undercuts."""
    ops, times = random_tape(np.random.default_rng(2000 + seed), carries=False)
    time = run(times, *ops, num_k=NUM_K)
    assert np.all(time.exposed >= -1e-12) and np.all(time.hidden >= 0)
    np.testing.assert_allclose(time.total_s, time.exposed.sum(axis=0))
    device = sum(np.where(o.present, times[o.name][0], 0.0) for o in ops if o.stream == "compute")
    assert np.all(time.total_s >= np.maximum(device, time.issue) - 1e-9)


def test_launches_that_block_leave_nothing_beside_anything() -> None:
    """Two ops of 30 and of twice 5 s, a collective of 50 between them that one alone would wait for; issue 2, 3 and 1.
    The host is far ahead where nothing blocks: 30 and 10 beside 50. Blocking, each launch is issued, runs and is waited
    for (20): 2 + 30 + 20, 1 + 50 + 20, 3 + 10 + 2 x 20."""
    times: Times = {"a": (30.0, 2.0), "c": (50.0, 1.0), "b": (10.0, 3.0)}
    ops = op("a", "x"), send("c", "x"), op("b", "a", launches=2)
    assert run(times, *ops, slowdown=0.0).total_s.tolist() == [40.0]
    with timed(times):
        time = time_per_tape_repetition(tape(*ops), machine(blocking=True))
    assert parts(time) == {"gemm": 40.0, "tp": 50.0, "host_idle": 86.0}
    assert float(time.hidden.sum()) == 0.0
