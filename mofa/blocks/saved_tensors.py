"""What the backward pass of a tape reads: tensors that the forward kept, or copies that it makes again."""

from __future__ import annotations

from mofa.blocks.checkpoint_frames import checkpoint_groups_by_name, ops_not_recomputed_after_chunks
from mofa.blocks.elementwise import BoolK, FloatK, all_true, any_true, logical_not, where
from mofa.blocks.op import Op, Tape, Tensor
from mofa.blocks.recomputation import Recompute, is_token_chunk_region
from mofa.blocks.work import Collective, HostSync, MemoryBound


class SavedTensorFinder:
    """Finds the saved tensors that a backward op reads; of recomputed ones adds the ops that make them again."""

    def __init__(self, forward: Tape, recompute: Recompute) -> None:
        self.forward = forward
        self.recompute = recompute
        self.tensors: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self.group_of = {op.name: recompute.group_of_op(op) for op in forward.ops}
        self.kept_ops = recompute.keep_outputs.intersection(self.group_of)
        self.producer = {w: op.name for op in forward.ops for w in op.writes}
        self.makers = {w: op for op in forward.ops for w in op.writes}
        self.replayed: set[str] = set()
        self.behind = ops_not_recomputed_after_chunks(forward, self.group_of)
        self.framed = checkpoint_groups_by_name(forward, self.group_of) if recompute.reentrant else {}
        self.let_go: list[Op] = []  # hold what the op before them reads for some candidates alone

    def _frame_tensor(self, name: str) -> str:
        """What a frame has of a group's input: a discarded one has its memory back once it is made again, else none."""
        producer = self.producer.get(name)
        group = self.group_of[producer] if producer else ""
        if not group or group not in self.recompute.discard:
            return name
        return f"{name} restored" if group in self.replayed else ""

    def _tensor(self, name: str, like: str, kind: str | None = None) -> str:
        source = self.forward.tensors.get(like) or self.tensors[like]
        kind = kind or source.kind
        self.tensors[name] = source._replace(name=name, kind=kind, grad=False, grad_recorded_on_nccl_stream=False)  # type: ignore[arg-type]
        return name

    def _saved(self, reader: Op, name: str) -> str:
        """The name under which a backward op finds a tensor that its forward op kept.

        What is a discarded tensor's memory for some candidates alone is read by them as made again.
        """
        saved = self._saved_name(reader, name)
        source, shared = self.recompute.discarded_tensor_behind_views(name, self.makers)
        if saved != name or not any_true(shared):
            return saved
        again = self._saved_name(reader, source)
        if all_true(shared):
            return again
        either = f"{name} restored"
        if either not in self.tensors:
            self.tensors[either] = Tensor(either, 0.0 * self.forward.tensors[name].bytes, "activation", False)
            part = self.makers[name].part
            self.ops.append(Op(either, "memory_bound", None, (again,), (either,), view=shared, launches=0, part=part))
        self.let_go.append(
            Op(f"{name} else", "memory_bound", None, (name,), launches=0, present=logical_not(shared),
               part=self.makers[name].part)
        )  # fmt: skip
        return either

    def _saved_name(self, reader: Op, name: str) -> str:
        producer = self.producer.get(name)
        if producer is None or producer in self.kept_ops or producer in self.behind:
            return name
        group = self.group_of[producer]
        if not group:  # nearly always
            return name
        reading = self.group_of[reader.name]
        same = reading == group or (group == "full" and is_token_chunk_region(reading))
        if same or group in self.recompute.discard:
            if group not in self.replayed:
                self._replay(group)
                self._restore(group)
            return f"{name}~" if same or group not in self.framed else f"{name} restored"
        return name

    def _restore(self, group: str) -> None:
        """What left a discarded group gets its memory back and is copied there from what was made again, which autograd
        holds beside it (tensor_parallel/random.py, ``CheckpointWithoutOutput._recompute``)."""
        if group not in self.recompute.discard or group not in self.framed:
            return
        for name in self.framed[group].outputs:
            again, back = f"{name}~", f"{name} restored"
            self._tensor(back, name)
            work = MemoryBound(2.0 * self.tensors[again].bytes, "copy")
            self.ops.append(Op(back, "recompute", work, (again,), (back,), part=self.makers[name].part))

    def _replay(self, group: str) -> None:
        self.replayed.add(group)
        again = {
            w: f"{w}~"
            for op in self.forward.ops
            if self.group_of[op.name] == group and op.name not in self.kept_ops
            for w in op.writes
        }
        begun: BoolK = not self.recompute.reentrant
        owed: FloatK = 0.0
        for op in self.forward.ops:
            if self.group_of[op.name] != group or op.name in self.behind:
                continue
            if op.name in self.kept_ops:  # called again for its kept result, which goes through the hooks as well
                owed = owed + where(op.present, op.hooked_tensors, 0.0)
                continue
            issued = (op.launches > 0) & op.present
            begins, paid = logical_not(begun) & issued, where(issued, owed, 0.0)
            begun, owed = begun | issued, owed - paid
            reads = tuple(again.get(r) or self._saved(op, r) for r in op.reads)
            for w in op.writes:
                self._tensor(f"{w}~", w)
            comm = isinstance(op.work, (Collective, HostSync))
            self.ops.append(
                op._replace(
                    name=f"{op.name}~",
                    repeated=True,
                    origin=op.name,
                    family=op.family if comm else "recompute",
                    reads=reads,
                    writes=tuple(f"{w}~" for w in op.writes),
                    saves=(),
                    hooked_tensors=op.hooked_tensors + paid,
                    checkpoints=where(begins, 1.0, 0.0),
                )
            )
