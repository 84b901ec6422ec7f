"""A block's backward with deferred weight gradients: the backward by inputs first, that by weights later.

PyTorch differentiates a stage by its input first and keeps what reaches each of its weights' nodes; later it
differentiates those, once for each weight (torch.distributed.pipelining, ``stage_backward_input`` and
``stage_backward_weight``). Each is a pass of autograd's own, and a checkpoint makes its block again in each of them
(torch/utils/checkpoint.py, ``_checkpoint_hook``: what was made again is known by the pass). What a pass takes of it is
gone then; all else is kept until autograd lets the node go that had saved it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from mofa.blocks.elementwise import BoolK, FloatK
from mofa.blocks.op import Op, Tape, Tensor
from mofa.blocks.roles import WEIGHT_ROLES
from mofa.blocks.work import MemoryBound

CHECKPOINT_KEEPS = "checkpoint keeps"
"""The op behind a block's backward by weights that reads what stays until the whole chunk's is through."""
_NEVER = -1


class SplitBackward(NamedTuple):
    """Both halves of a backward: by inputs and by weights.

    ``by_weights`` is that of a layer with others behind it in its chunk. ``by_weights_of_last_block`` is that of the
    last one, whose graph is let go from its end.
    """

    by_inputs: Tape
    by_weights: Tape
    by_weights_of_last_block: Tape


def split_backward(forward: Tape, backward: Tape, checkpointed: bool) -> SplitBackward:
    """A backward in its halves; ``checkpointed`` where one checkpoint is around the whole block."""
    inputs = replace(backward, ops=tuple([op for op in backward.ops if op.role not in WEIGHT_ROLES]))
    made = _Groups(forward, backward, checkpointed)
    weights = made.weights(no_weight_at_end=False)
    return SplitBackward(inputs, weights, made.weights(no_weight_at_end=True) if checkpointed else weights)


class _Groups:
    """The weights of a block, each with the ops that make its gradient, in the order of its modules."""

    def __init__(self, forward: Tape, backward: Tape, checkpointed: bool) -> None:
        self.forward, self.backward = forward, backward
        self.again = [op for op in backward.ops if op.repeated] if checkpointed else []
        made: dict[str, list[Op]] = {}
        for op in backward.ops:
            if op.role in WEIGHT_ROLES:
                made.setdefault(_weight_of(op, backward.tensors), []).append(op)
        back = {op.origin: op for op in backward.ops if op.role == "backward"}
        of: dict[str, list[Op]] = {}
        for op in forward.ops:
            if op.name in made:
                of[op.name] = made.pop(op.name)
            elif is_norm_with_weight(op) and op.name in back:
                # its weight's gradient takes its share of the kernels that are counted with the input's
                of[op.name] = [
                    Op(
                        f"{op.name}.wgrad",
                        "memory_bound",
                        None,
                        back[op.name].reads,
                        (),
                        launches=0,
                        role="wgrad",
                        origin=op.name,
                    )
                ]
        registered_at = {op.name: op.registered_at for op in forward.ops}
        self.names = sorted(of, key=registered_at.__getitem__)
        self.ops = [of[name] for name in self.names]
        self.rest = [op for ops in made.values() for op in ops]  # what data parallelism adds of them all
        self.last = self._last_behind()

    def _last_behind(self) -> dict[str, int]:
        """The last of the weights, by its number, whose node autograd reaches an op's from; those that none does are
        not among them."""
        number = {name: i for i, name in enumerate(self.names)}
        out: dict[str, int] = {}
        reached: dict[str, int] = {}
        for op in reversed(self.forward.ops):
            last_weight = max([reached.get(name, _NEVER) for name in op.writes] + [number.get(op.name, _NEVER)])
            out[op.name] = last_weight
            for name in op.reads:
                reached[name] = max(reached.get(name, _NEVER), last_weight)
        return out

    def _gone(self, no_weight_at_end: bool) -> dict[str, int]:
        """Behind which weight a saved tensor is let go, by its name; the number of weights where none does."""
        number = {name: i for i, name in enumerate(self.names)}
        out: dict[str, int] = {}
        again = {op.origin for op in self.again}
        for op in self.forward.ops:
            if op.name not in again:
                continue
            own = number.get(op.name, self.last[op.name] if no_weight_at_end else len(self.names))
            for name in op.saves:
                out[name] = max(out.get(name, _NEVER), own)
        return out

    def _copies(self) -> dict[str, str]:
        """What is made again of each of the forward's tensors."""
        made = {op.name: op.writes for op in self.forward.ops}
        return {name: copy for op in self.again for name, copy in zip(made[op.origin], op.writes, strict=True)}

    def weights(self, *, no_weight_at_end: bool) -> Tape:
        """For each weight the block again, its gradient, and what is let go behind it."""
        ops: list[Op] = []
        tensors: dict[str, Tensor] = dict(self.backward.tensors)
        makes = [w for op in self.again for w in op.writes]
        copies = self._copies()
        gone = {
            copies[name]: weight_index for name, weight_index in self._gone(no_weight_at_end).items() if name in copies
        }
        saved = [name for name in makes if name in gone]
        let_go_behind: dict[int, list[str]] = {}
        before: list[str] = []
        summed: list[str] = []
        for i, weight_ops in enumerate(self.ops):
            new = {name: f"{name}{i}" for name in makes}
            for name, renamed in new.items():
                tensors[renamed] = tensors[name]._replace(name=renamed)
            given = weight_ops[0].reads[0]  # is added to 0, as a list of gradients that is summed up (``summed_grad``)
            total = f"{given}={i}"
            tensors[total] = tensors[given]._replace(name=total)
            ops.append(_sum(total, given, tensors[given].bytes, weight_ops[0].present))
            ops.append(_mark("gradients summed", [total, *summed]))
            summed = [total]
            weight_ops = [op._replace(reads=tuple(total if r == given else r for r in op.reads)) for op in weight_ops]
            for op in (*self.again, *weight_ops):
                ops.append(op._replace(reads=_renamed(op.reads, new), writes=_renamed(op.writes, new)))
                if self.again and op is self.again[-1]:  # its graph, which holds what its ops saved, goes at its end
                    ops.append(_mark("checkpoint made", [new[name] for name in saved]))
            # the last gradient has its name until the next one takes it (``dweights``)
            ops.append(_mark("gradients added", [given, *before]))
            before = [w for op in weight_ops for w in op.writes]
            for name in saved:
                if gone[name] > i:
                    let_go_behind.setdefault(gone[name], []).append(new[name])
            if i in let_go_behind:
                ops.append(_mark(f"checkpoint lets go behind {self.names[i]}", let_go_behind.pop(i)))
        left_over = [name for names in let_go_behind.values() for name in names]
        inputs = [r for op in self.again for r in op.reads if r in self.forward.inputs]
        ops += self.rest
        ops.append(_mark(CHECKPOINT_KEEPS, [*dict.fromkeys(inputs), *left_over])._replace(purpose="checkpoint_end"))
        return Tape(tuple(ops), tensors, (), ())


def _weight_of(op: Op, tensors: dict[str, Tensor]) -> str:
    """The op of the forward whose weight's gradient an op makes or adds; empty of data parallelism's for a group."""
    if op.origin or op.part == "fsdp":
        return op.origin
    return tensors[op.reads[0]].weight if op.reads else ""


def is_norm_with_weight(op: Op) -> bool:
    """Whether an op is a norm with a weight: what no linear layer is and yet is learned."""
    return op.purpose == "norm"


def _mark(name: str, reads: list[str]) -> Op:
    return Op(name, "memory_bound", None, tuple(reads), (), launches=0)


def _sum(total: str, given: str, nbytes: FloatK, present: BoolK) -> Op:
    return Op(f"sum {given}", "memory_bound", MemoryBound(2.0 * nbytes, "copy"), (given,), (total,), present=present)


def _renamed(names: tuple[str, ...], new: dict[str, str]) -> tuple[str, ...]:
    return tuple(new.get(name, name) for name in names)
