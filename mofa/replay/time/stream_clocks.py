"""The clocks of one rank: the host's, the computing stream's and one for every other stream.

An op starts when its stream is free, what it reads is there and the host has issued it. While another stream
communicates, computing advances by ``1 - slowdown`` of its rate, and what that costs counts as exposed communication.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from mofa.blocks.op import HOST_COPY_STREAMS
from mofa.cost.block.tape_clock import EXPOSED
from mofa.cost.kernels.launch_queue import QUEUE
from mofa.replay.time.kernel_runs import (
    FAMILY,
    NOW,
    STRAGGLERS,
    HostSyncStep,
    KernelRun,
    SideStreamOp,
    Step,
    TapeSteps,
    TensorAlias,
    is_communication_family,
)
from mofa.replay.time.op_recorder import OpRecorder

HOST = FAMILY["host_idle"]
FEW = 128.0
"""Launches of a run that are taken as one in the queue. [-]"""
PARTS = 8
"""Parts of what a call launches after which it is seen whether the queue is full. [-]"""
LONG_AGO = -inf
"""Of what waited for nothing that computing does. [s]"""
Relative = tuple[object, ...]


@dataclass
class StreamClocks:
    """How far a rank's streams have played, and its host. [s]

    ``exposed`` counts what the computing stream did and waited for, by :data:`mofa.cost.block.tape_clock.EXPOSED`,
    ``idle_s`` its idle part by what it waited for, ``side_stream_s`` what other streams did. ``ready`` says when
    tensors that cross streams are there and which family makes them (-1: computing); ``ops_in_flight`` what other
    streams are at, in the order of their launches: start, end, family, what computing loses meanwhile, and when
    computing got to the launch.
    """

    sync_s: float
    compute: float = 0.0
    host: float = 0.0
    streams: dict[str, float] = field(default_factory=dict)
    ready: dict[str, tuple[float, int]] = field(default_factory=dict)
    ops_in_flight: list[tuple[float, float, int, float, float]] = field(default_factory=list)
    exposed: list[float] = field(default_factory=lambda: [0.0] * len(EXPOSED))
    side_stream_s: list[float] = field(default_factory=lambda: [0.0] * len(EXPOSED))
    idle_gaps: list[tuple[float, float]] = field(default_factory=list)
    """When the computing stream waited, as far back as something may still be launched beside it."""
    idle_s: list[float] = field(default_factory=lambda: [0.0] * len(EXPOSED))
    late_issue_s: list[float] = field(default_factory=lambda: [0.0] * len(EXPOSED))
    """Of ``exposed``, by family, what was waited only because the host issued a collective late: host idle by name."""
    late_by_host_s: float = 0.0
    """How much sooner computing would have come as far as it is, had the host issued ahead. [s]"""
    counted_since_s: float = 0.0
    """Where computing was when counting began. [s]"""
    delay_of_tensor: dict[str, float] = field(default_factory=dict)
    """How much sooner a tensor that streams share would be there, had the host issued ahead; none where zero. [s]"""
    delay_of_stream: dict[str, float] = field(default_factory=dict)
    """The same of when a stream or a communicator is free. [s]"""
    watch: OpRecorder | None = None
    own_order: bool = True
    """Whether any stream begins before what was launched ahead of it has ended."""
    launched: float = 0.0
    """Launches since the host last waited for the device, or since the computation under way began. [-]"""
    enqueued: float = 0.0
    """The same, up to the kernel that was computed last. [-]"""
    queue: deque[tuple[float, float, float, float]] = field(default_factory=deque)
    """Of these, by kernels or runs of them: the launches up to its last, its own, and when the device begins and ends
    it. [-], [-], [s], [s]"""

    def play_tape(self, part: TapeSteps, follow: str) -> None:
        """Play a tape; ``follow`` is the name under which the next one reads its output, empty for none."""
        self.play_steps(part.steps)
        if follow:
            made = self.ready.get(part.output_tensor)
            if made is None or made[0] <= self.compute:
                self.ready.pop(follow, None)
            else:
                self.ready[follow] = made
                self._set_delay(follow, self.delay_of_tensor.get(part.output_tensor, 0.0))
            if self.watch is not None:
                self.watch.alias_tensor(follow, part.output_tensor)

    def play_steps(self, steps: Iterable[Step]) -> None:
        """Play steps one after the other."""
        for step in steps:
            if type(step) is KernelRun:
                self._run(step)
            elif type(step) is SideStreamOp:
                self._beside(step)
            elif type(step) is HostSyncStep:
                self.synchronise(step.host_s, step.reads)
            elif type(step) is TensorAlias:
                source = self.ready.get(step.source)
                if source is None:
                    self.ready.pop(step.name, None)
                else:
                    self.ready[step.name] = source
                    self._set_delay(step.name, self.delay_of_tensor.get(step.source, 0.0))
                if self.watch is not None:
                    self.watch.alias_tensor(step.name, step.source)

    def synchronise(self, host_s: float = 0.0, reads: tuple[str, ...] = ()) -> None:
        """The host waits for the device, or for what it reads of other streams, and then computes. [s]"""
        until = self.compute
        if reads:
            until = max([self.ready[name][0] for name in reads if name in self.ready], default=self.host)
        else:
            self.empty_launch_queue()
        self.host = max(self.host, until) + self.sync_s + host_s
        if self.watch is not None:
            self.watch.synchronise(reads)

    def wait_for(self, names: tuple[str, ...]) -> None:
        """The computing stream waits for tensors of other streams."""
        if self.watch is not None:
            self.watch.await_tensors(names)
        for name in names:
            made = self.ready.get(name)
            if made is None or made[1] < 0 or (made[0] <= self.compute and not self.late_by_host_s):
                continue
            wait_s = max(made[0] - self.compute, 0.0)
            in_time_s = max(made[0] - self.delay_of_tensor.get(name, 0.0) - self.compute + self.late_by_host_s, 0.0)
            late_s = wait_s - in_time_s
            self.exposed[made[1]] += wait_s
            self.late_issue_s[made[1]] += late_s
            self.late_by_host_s += late_s
            if wait_s:
                self.idle_s[made[1]] += min(in_time_s, wait_s)
                self.idle_s[HOST] += max(late_s, 0.0)
                if self.watch is not None:
                    self.watch.add_wait(name, made[1], self.compute, made[0])
                self.idle_until(made[0])

    def _run(self, step: KernelRun) -> None:
        if step.waits:
            self.wait_for(step.waits)
        in_queue = self.launched + step.launches <= QUEUE or step.launches <= FEW
        if self.watch is None and in_queue and self.host + step.lead <= self.compute:
            for family, seconds in step.parts:
                self.exposed[family] += seconds
            start = self.compute
            self._advance(step.busy)
            self._enqueue(step.launches, start)
            self.host = self._issue(self.host, step.issue, step.launches)
        else:
            exposed, watch = self.exposed, self.watch
            begun, issued_s, launched = self.host, 0.0, 0.0
            loop_start, in_loop = 0.0, 0.0
            for name, seconds, issue, family, launches, is_in_loop, issue_behind_s, works, waited_s in step.kernels:
                if in_loop and not is_in_loop:
                    self._enqueue(in_loop, loop_start)
                    in_loop = 0.0
                if issue > 0.0 and launched:
                    begun = self._issue(begun, issued_s, launched)
                    issued_s = launched = 0.0
                if is_in_loop and not in_loop:
                    loop_start = max(self.compute, begun + issued_s)
                issued_s += issue
                launched += launches
                start, host = self.compute, begun + issued_s
                if seconds > 0:
                    if host > start:
                        exposed[HOST] += host - start
                        self.idle_s[HOST] += host - start
                        self.late_by_host_s += host - start
                        self.idle_gaps.append((start, host))
                        self.compute = start = host
                    exposed[family] += seconds - waited_s
                    exposed[STRAGGLERS] += waited_s
                    if self.ops_in_flight:
                        self._advance(seconds)
                    else:
                        self.compute = start + seconds
                    if watch is not None:
                        watch.add_computation(name, family, start, self.compute, works)
                if is_in_loop:
                    issued_s += issue_behind_s
                    in_loop += launches
                else:
                    self._enqueue(launches, start)
            self._enqueue(in_loop, loop_start)
            self.host = self._issue(begun, issued_s, launched)
        if self.watch is not None:
            self.watch.mark_tensors_ready(step.records)
        for name in step.records:
            self.ready[name] = (self.compute, -1)
            self._set_delay(name, self.late_by_host_s)

    def empty_launch_queue(self) -> None:
        """Empty the launch queue: nothing that was launched is still to be computed, or nothing is known of it."""
        self.launched = self.enqueued = 0.0
        self.queue.clear()

    def _enqueue(self, launches: float, start: float) -> None:
        """The device computes so many launches from ``start`` until now."""
        if launches:
            self.enqueued += launches
            self.queue.append((self.enqueued, launches, start, self.compute))

    def _issue(self, begun: float, issue_s: float, launches: float) -> float:
        """When the host has issued so many launches, spread evenly from ``begun`` on. [s]

        Each waits until the launch that is :data:`QUEUE` ahead of it is under way.
        """
        first = self.launched - QUEUE
        self.launched += launches
        if first + launches <= 0.0:
            return begun + issue_s
        host = begun
        for part in range(1, PARTS + 1):
            host = max(host + issue_s / PARTS, self._under_way(first + launches * part / PARTS))
        return host

    def _under_way(self, launch: float) -> float:
        """When the device begins a launch, by its number; long ago if it is not known. [s]"""
        queue = self.queue
        while queue and queue[0][0] < launch:
            queue.popleft()
        if not queue:
            return -inf
        last, number, begin, end = queue[0]
        into = launch - (last - number)
        return begin + (end - begin) * into / number if into > 0.0 else -inf

    def idle_until(self, time: float) -> None:
        """Compute nothing until then."""
        self.idle_gaps.append((self.compute, time))
        self.compute = time

    def _advance(self, work: float) -> None:
        """Compute for so long, the longer while other streams communicate."""
        flying = self.ops_in_flight
        if not flying:
            self.compute += work
            return
        now = self.compute
        while work > 0:
            lost, rate, until = 0.0, 1.0, float("inf")
            for start, end, _, slows, _ in flying:
                if start <= now < end:
                    lost, rate = lost + slows, rate * (1.0 - slows)
                    until = min(until, end)
                elif start > now:
                    until = min(until, start)
            span = min(until - now, work / rate) if rate else until - now
            if lost:
                for start, end, family, slows, _ in flying:
                    if start <= now < end:
                        self.exposed[family] += span * (1.0 - rate) * slows / lost
            if span * rate >= work * (1.0 - 1e-12):
                now += span
                break
            work -= span * rate
            now = until
        self.compute = now
        self.ops_in_flight = [item for item in flying if item[1] > now]

    def _end_of_copy(self, start: float, work: float) -> float:
        """When a copy on another stream ends, which loses by what is in flight beside it as computing does. [s]"""
        now, left = start, work
        edges = {edge for begin, end, *_ in self.ops_in_flight for edge in (begin, end) if edge > start}
        for until in (*sorted(edges), inf):
            rate = 1.0
            for begin, end, _, slows, _ in self.ops_in_flight:
                if begin <= now < end:
                    rate *= 1.0 - slows
            if (until - now) * rate >= left:
                break
            left -= (until - now) * rate
            now = until
        return now + left / rate

    def _slow_copies(self, start: float, end: float, slowdown: float) -> None:
        """Let copies in flight on other streams, which take bandwidth as computing does, end later beside a launch."""
        moved: dict[float, float] = {}
        for begin, until, _, slows, _ in self.ops_in_flight:
            since = max(begin, start)
            if slows >= 1.0 and until > since:
                beside_s = min((until - since) / (1.0 - slowdown), end - since)
                moved[until] = until + slowdown * max(beside_s, 0.0)
        if moved:
            self._move_ends(moved)

    def _move_ends(self, moved: dict[float, float]) -> None:
        """Put ends of what is in flight later, and with them what is ready and free then."""
        self.ops_in_flight = [
            (begin, moved.get(until, until), family, slows, launched)
            for begin, until, family, slows, launched in self.ops_in_flight
        ]
        self.streams = {name: moved.get(busy_until, busy_until) for name, busy_until in self.streams.items()}
        self.ready = {name: (moved.get(made, made), family) for name, (made, family) in self.ready.items()}

    def _beside(self, step: SideStreamOp) -> None:
        _, seconds, issue, family, stream, reads, writes, slows, communicator, _, _ = step
        streams, ready = self.streams, self.ready
        self.host = start = self.host + issue
        communicator = "@" + communicator if communicator else stream
        # when it would start if the host had issued all as soon as what was launched before it had been computed
        computed = self.compute - self.late_by_host_s
        unheld = min(start, computed if NOW in reads else self.counted_since_s)
        for name_of_queue in (stream, communicator):
            if (free := streams.get(name_of_queue, 0.0)) > start:
                start = free
            unheld = max(unheld, free - self.delay_of_stream.get(name_of_queue, 0.0))
        for source in reads:
            if source == NOW:
                start, unheld = max(start, self.compute), max(unheld, computed)
            elif (made := ready.get(source)) is not None:
                start, unheld = max(start, made[0]), max(unheld, made[0] - self.delay_of_tensor.get(source, 0.0))
        end = start + seconds
        if slows >= 1.0 and seconds > 0.0 and self.ops_in_flight:  # a copy, which takes bandwidth as computing does
            end = self._end_of_copy(start, seconds)
        streams[stream] = streams[communicator] = end
        self.delay_of_stream[stream] = self.delay_of_stream[communicator] = start - unheld
        for made_here in writes:
            ready[made_here] = (end, family)
            self._set_delay(made_here, start - unheld)
        if seconds > 0:
            self.side_stream_s[family] += seconds
            if start < self.compute:
                self._catch_up(start, end, step)
            if 0.0 < slows < 1.0 and self.ops_in_flight:
                self._slow_copies(start, end, slows)
            if is_communication_family(family) and end > self.compute:
                launched = self.compute if NOW in reads else LONG_AGO
                self.ops_in_flight.append((start, end, family, slows, launched))
        if self.watch is not None:
            self.watch.add_side_op(step, start, end)

    def _set_delay(self, name: str, delay_s: float) -> None:
        if delay_s > 0.0:
            self.delay_of_tensor[name] = delay_s
        else:
            self.delay_of_tensor.pop(name, None)

    def reset_counts(self) -> None:
        """Count from nothing what is exposed, beside and waited; what was issued late before matters no more."""
        self.exposed, self.side_stream_s, self.idle_s, self.late_issue_s = ([0.0] * len(EXPOSED) for _ in range(4))
        self.late_by_host_s, self.counted_since_s = 0.0, self.compute
        self.delay_of_tensor, self.delay_of_stream = {}, {}

    def exposed_side_stream_idle_late_s(self) -> list[list[float]]:
        """Exposed, beside, waited and late-issue seconds. (4, len(EXPOSED)) [s]"""
        return [self.exposed, self.side_stream_s, self.idle_s, self.late_issue_s]

    def _catch_up(self, start: float, end: float, step: SideStreamOp) -> None:
        """Slow down what was computed before a launch that the host made far ahead, as it ran beside that.

        Of what it computed by then it loses as much as if it had been told ahead: work of C takes C / (1 - slowdown),
        but loses no more than the launch lasts. What computing launched meanwhile on other streams is launched later,
        too.
        """
        slowdown, until = step.computing_slowdown, min(end, self.compute)
        computed_s = self._computed_s(start, until)
        if slowdown < 1.0:
            computed_s = min(computed_s / (1.0 - slowdown), computed_s + max(end - until, 0.0))
        lost = slowdown * computed_s
        if lost > 0.0:
            self.exposed[step.family] += lost
            self._move_launches(start, until, slowdown)
            if self.watch is not None:
                self.watch.add_computation(f"slowed beside {step.name}", step.family, self.compute, self.compute + lost)
            self.compute += lost

    def _computed_s(self, start: float, end: float) -> float:
        """How long the computing stream did not wait between two times. [s]"""
        waits = 0.0
        for a, b in reversed(self.idle_gaps):  # the last ones come first: there may be many before that are over
            if b <= start:
                break
            waits += max(min(end, b) - max(start, a), 0.0)
        return max(end - start - waits, 0.0)

    def _move_launches(self, start: float, end: float, slowdown: float) -> None:
        """Launch later what computing launched since ``start``, and what queues behind that; it lost up to ``end``."""
        moved: dict[float, float] = {}
        flying = []
        for begin, until, family, slows, launched in self.ops_in_flight:
            begins = moved.get(begin, begin)
            if launched > start:
                launched += slowdown * self._computed_s(start, min(end, launched))
                begins = max(begins, launched)
            if begins > begin:
                moved[until] = until + begins - begin
            flying.append((begins, until, family, slows, launched))
        if moved:
            self.ops_in_flight = flying
            self._move_ends(moved)

    def wait_for_all_streams(self, family: int) -> None:
        """The computing stream waits for all others, as at the end of a step; nobody waits for activations' copies."""
        awaited = [name for name in self.streams if name not in HOST_COPY_STREAMS]
        last_stream = max(awaited, key=self.streams.__getitem__, default="")
        last = self.streams.get(last_stream, self.compute)
        if last > self.compute:
            self.ready["@drain"] = (last, family)
            self._set_delay("@drain", self.delay_of_stream.get(last_stream, 0.0))
            if self.watch is not None:
                self.watch.await_streams()
            self.wait_for(("@drain",))
            del self.ready["@drain"]

    def delay_all_streams(self, seconds: float) -> None:
        """Put the clocks of host and streams, and what is in flight on them, so many seconds later. [s]"""
        self.compute += seconds
        self.host += seconds
        self.streams = {name: busy_until + seconds for name, busy_until in self.streams.items()}
        self.ready = {name: (busy_until + seconds, family) for name, (busy_until, family) in self.ready.items()}
        self.ops_in_flight = [
            (begin + seconds, end + seconds, family, slows, launched + seconds)
            for begin, end, family, slows, launched in self.ops_in_flight
        ]
        self.idle_gaps = [(begin + seconds, end + seconds) for begin, end in self.idle_gaps]
        self.empty_launch_queue()

    # -- what decides what comes next
    def forget_past_and_take_relative_state(self, longest: float) -> Relative:
        """Forget what can matter no more and give the rest relative to the computing stream.

        A host further ahead than ``longest`` is as good as one that far ahead.
        """
        now, host = self.compute, self.host
        if host < now - longest:
            self.host = host = now - longest
        streams, ready, flying, gaps = self.streams, self.ready, self.ops_in_flight, self.idle_gaps
        over = not gaps or (not self.own_order and longest != inf and gaps[-1][1] <= now)
        if over and not (streams or ready or flying):
            if gaps:  # they come one behind the other
                self.idle_gaps = []
            return (_tenth_ns(host - now),)
        # nothing begins before now but what is launched once or on streams of their own order
        since = host if self.own_order or longest == inf else now
        if gaps:
            gaps = self.idle_gaps = [gap for gap in gaps if gap[1] > since]
        if streams:
            streams = self.streams = {name: busy_until for name, busy_until in streams.items() if busy_until > since}
        if ready:
            ready = self.ready = {name: made for name, made in ready.items() if made[0] > now or made[0] > since}
        if flying:
            flying = self.ops_in_flight = [item for item in flying if item[1] > now]
        if not (streams or ready or flying or gaps):
            return (_tenth_ns(host - now),)
        return (
            _tenth_ns(host - now),
            tuple(sorted([(name, _tenth_ns(busy_until - now)) for name, busy_until in streams.items()])),
            tuple(sorted([(name, _tenth_ns(until - now), family) for name, (until, family) in ready.items()])),
            tuple([(_tenth_ns(max(start - now, 0.0)), _tenth_ns(end - now), *of) for start, end, *of, _ in flying]),
            tuple([(_tenth_ns(start - now), _tenth_ns(end - now)) for start, end in gaps]),
        )  # fmt: skip


def _tenth_ns(seconds: float) -> int:
    """How many of them ``round(seconds, 10)`` has, which takes several times as long.

    Examples
    --------
    >>> _tenth_ns(1.23456e-6), _tenth_ns(-2.5e-10)
    (12346, -3)
    """
    scaled = seconds * 1e10
    tenths = round(scaled)
    if abs(scaled - tenths) > 0.49:  # the product's own rounding may have decided
        tenths = round(round(seconds, 10) * 1e10)
    return tenths
