"""Sends and receives of each framework around an order's computations, in the order of their launch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mofa.schedules.order import SENDS, Action, Exchange, Item, Order, Program


def send_and_receive_of(order: Order, action: Action) -> tuple[Action, Action] | None:
    """Send and receive of a computation's result; None where its reader is on the same rank."""
    kind, stage, micro_batch = action
    if kind == "F":
        if order.sends_to_other_rank[stage]:
            return Action("SEND_F", stage, micro_batch), Action("RECV_F", stage + 1, micro_batch)
    elif kind != "W" and stage and order.sends_to_other_rank[stage - 1]:
        return Action("SEND_B", stage, micro_batch), Action("RECV_B", stage - 1, micro_batch)
    return None


def receive_needed_by(order: Order, action: Action) -> Action | None:
    """The receive that a computation needs; None where it has no input or its own rank makes that."""
    kind, stage, micro_batch = action
    if kind == "F":
        if stage and order.sends_to_other_rank[stage - 1]:
            return Action("RECV_F", stage, micro_batch)
    elif kind != "W" and order.sends_to_other_rank[stage]:
        return Action("RECV_B", stage, micro_batch)
    return None


def _send(order: Order, action: Action) -> Action | None:
    """The send of a computation's result, the first of :func:`send_and_receive_of`."""
    kind, stage, micro_batch = action
    if kind == "F":
        return Action("SEND_F", stage, micro_batch) if order.sends_to_other_rank[stage] else None
    return (
        Action("SEND_B", stage, micro_batch) if kind != "W" and stage and order.sends_to_other_rank[stage - 1] else None
    )


def _sends(order: Order, action: Action) -> tuple[Action, ...]:
    send = _send(order, action)
    return (send,) if send else ()


def _receives(order: Order, action: Action) -> tuple[Action, ...]:
    got = receive_needed_by(order, action)
    return (got,) if got else ()


def exchanges_before_and_after_computations(order: Order) -> Program:
    """A receive before each computation, which waits for it, and a send after it, for which nothing waits.

    This is torch's ``ScheduleGPipe``: sends are awaited only at the end of the forwards and of the backwards.
    """
    ranks: list[tuple[Item, ...]] = []
    for actions in order.ranks:
        out: list[Item] = []
        for act in actions:
            out += [Exchange(ops) for ops in (_receives(order, act),) if ops]
            out.append(act)
            out += [Exchange(ops, blocking=False) for ops in (_sends(order, act),) if ops]
        ranks.append(tuple(out))
    return Program(order, tuple(ranks))


def torch_one_f_one_b_exchanges(order: Order) -> Program:
    """torch's ``Schedule1F1B``: in the steady state a send goes with the receive of the other direction, in one launch.

    The first ``pp - r`` forwards are the warm-up. Its last send is launched with the first backward's receive.
    """
    ranks: list[tuple[Item, ...]] = []
    for actions in order.ranks:
        out: list[Item] = []
        unsent: tuple[Action, ...] = ()
        for i, act in enumerate(actions):
            before = actions[i - 1] if i else None
            turn = before is not None and before.kind != act.kind
            ops = (*unsent, *_receives(order, act)) if turn else _receives(order, act)
            if not turn and unsent:
                out.append(Exchange(unsent, blocking=False))
            if ops:
                out.append(Exchange(ops))
            out.append(act)
            unsent = _sends(order, act)
        if unsent:
            out.append(Exchange(unsent, blocking=False))
        ranks.append(tuple(out))
    return Program(order, tuple(ranks))


def megatron_one_f_one_b_exchanges(order: Order) -> Program:
    """Megatron's 1F1B: the host waits for every exchange and for the device (``batch_p2p_sync``).

    In the steady state, a send goes with a receive: from after its first forward until its last computation.
    """
    ranks: list[tuple[Item, ...]] = []
    for r, actions in enumerate(order.ranks):
        warmup = min(order.pp - r - 1, order.num_micro_batches)
        out: list[Item] = []
        unsent: tuple[Action, ...] = ()
        for i, act in enumerate(actions):
            steady = warmup < i < 2 * order.num_micro_batches - warmup
            groups = [(*unsent, *_receives(order, act))] if steady else [unsent, _receives(order, act)]
            out += [Exchange(ops) for ops in groups if ops]
            out.append(act)
            unsent = _sends(order, act)
        if unsent:
            out.append(Exchange(unsent))
        ranks.append(tuple(out))
    return Program(order, tuple(ranks))


def overlapped_exchanges(order: Order) -> Program:
    """Sends and receives beside computing: Megatron's interleaved schedule with ``overlap_p2p_comm``, or an ideal link.

    After a forward, its result is sent and the next forward's input received. Both run beside the backward in between;
    after backwards likewise. The receive of the first backward's input is launched after the last forward of the
    warm-up (Megatron-Core 0.16.1, pipeline_parallel/schedules.py, ``pp_post_forward`` and ``pp_post_backward``).

    Here each direction between two ranks has its own stream. Megatron orders them by even and odd ranks, on a
    communicator of each pair.
    """
    ranks: list[tuple[Item, ...]] = []
    streams = _Streams(order)
    for actions in order.ranks:
        coming: list[list[Item]] = [[] for _ in range(len(actions) + 1)]
        for act, behind in zip(actions, _launched_behind(actions), strict=True):
            if (need := receive_needed_by(order, act)) is not None:
                coming[behind + 1].append(Exchange((need,), streams.of(need), False))
        out: list[Item] = list(coming[0])
        for act, launched in zip(actions, coming[1:], strict=True):
            out.append(act)
            if (send := _send(order, act)) is not None:
                out.append(Exchange((send,), streams.of(send), False))
            out += launched
        ranks.append(tuple(out))
    return Program(order, tuple(ranks))


def _launched_behind(actions: Sequence[Action]) -> list[int]:
    """For each computation, the index of the one after which its receive is launched; -1 is before all."""
    last: dict[bool, int] = {}
    behind = []
    for i, act in enumerate(actions):
        behind.append(last.get(act.kind == "F", max(i - 2, -1)))
        if act.kind != "W":
            last[act.kind == "F"] = i
    return behind


class _Streams:
    """Names of streams: one for each direction between two ranks, for forwards or backwards."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.named: dict[tuple[str, int], str] = {}

    def of(self, op: Action) -> str:
        """The stream of a send or a receive."""
        kind, stage, _ = op
        name = self.named.get((kind, stage))
        if name is None:
            there = stage + (1 if kind in ("SEND_F", "RECV_B") else -1)
            ends = [self.order.rank_of(stage), self.order.rank_of(there)]
            a, b = ends if kind in SENDS else reversed(ends)
            name = self.named[kind, stage] = f"{a}>{b} {kind[-1]}"
        return name


def torch_multi_stage_exchanges(order: Order) -> Program:
    """PyTorch's multi-stage runtime: a send follows its computation, and the receiver's list gets the receive then.

    As in ``_add_send_recv``, ranks take turns to place their next computation; a rank passes if its input is not made
    yet. FSDP's gathers and reductions take turns too (``_add_unshard_reshard``). A rank's sends and receives run one
    after the other on one stream.

    Raises
    ------
    ValueError
        If no rank can go on: the order has a cycle.
    """
    out: list[list[Item]] = [[] for _ in range(order.pp)]
    todo = [deque(_with_shards(order, actions)) for actions in order.ranks]
    done: set[Action] = set()
    while any(todo):
        progress = False
        for r, queue in enumerate(todo):
            if not queue:
                continue
            act = queue[0]
            if act is not None:
                need = receive_needed_by(order, act)
                if need is None:
                    need = _local(order, act)
                if need is not None and need not in done:
                    continue
                out[r].append(act)
                done.add(act)
                if act.kind == "I":
                    done.add(act._replace(kind="B"))
                pair = send_and_receive_of(order, act)
                if pair is not None:
                    out[r].append(Exchange(pair[:1], blocking=False))
                    out[order.rank_of(pair[1].stage)].append(Exchange(pair[1:], blocking=False))
                    done.update(pair)
            queue.popleft()
            progress = True
        if not progress:
            waits = [f"rank {r} waits at {queue[0]}" for r, queue in enumerate(todo) if queue]
            raise ValueError(f"the order has a cycle: {'; '.join(waits)}")
    return Program(order, tuple(tuple(items) for items in out))


def _local(order: Order, act: Action) -> Action | None:
    """The computation of the neighbouring stage whose result this one needs, where both are on one rank."""
    if act.kind == "F" and act.stage:
        return Action("F", act.stage - 1, act.micro_batch)
    if act.kind in ("B", "I") and act.stage < order.num_stages - 1:
        return Action("B", act.stage + 1, act.micro_batch)
    return None


def _stages_ahead(actions: Sequence[Action], most: int = 3) -> list[list[int]]:
    """Of each computation the stages of it and the following ones, in the order in which they come, three at most.

    Examples
    --------
    >>> _stages_ahead([Action("F", 0, 0), Action("F", 1, 0), Action("F", 0, 1)])
    [[0, 1], [1, 0], [0]]
    """
    out: list[list[int]] = []
    ahead: list[int] = []
    for act in reversed(actions):  # a stage that comes earlier moves to the front
        ahead = [act.stage, *(stage for stage in ahead if stage != act.stage)]
        out.append(ahead[:most])
    return out[::-1]


def _with_shards(order: Order, actions: tuple[Action, ...]) -> list[Action | None]:
    """The computations, with a None for every turn of FSDP: to gather, reshard or reduce."""
    out: list[Action | None] = []
    active: list[int] = []
    left = dict.fromkeys({a.stage for a in actions}, order.num_micro_batches)
    for act, ahead in zip(actions, _stages_ahead(actions), strict=True):
        evict = [stage for stage in active if stage not in ahead]
        fetch = [stage for stage in ahead if stage not in active]
        out += [None] * (len(evict) + len(fetch))
        active = [stage for stage in active if stage in ahead] + fetch
        out.append(act)
        if act.kind in ("B", "W"):
            left[act.stage] -= 1
            if not left[act.stage]:
                out.append(None)
    return out + [None] * len(active)
