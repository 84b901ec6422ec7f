"""The backward pass of a tape, derived: one rule per kind of work, never written twice; with recomputation.

Names: ``d:x`` is the gradient of x, ``x~`` the recomputed copy of x. What the forward pass keeps is what the backward
tape reads; :mod:`mofa.blocks.lifetimes` finds it on the two tapes joined.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict

from mofa.blocks.checkpoint_frames import CheckpointGroup
from mofa.blocks.elementwise import any_true
from mofa.blocks.op import GRADIENT, RENEWAL, Op, Tape, Tensor
from mofa.blocks.recomputation import NO_RECOMPUTE, Recompute, is_token_chunk_region, without_unread_last_ops
from mofa.blocks.roles import WEIGHT_ROLES, LayerStep, Part
from mofa.blocks.saved_tensors import SavedTensorFinder
from mofa.blocks.work import (
    BACK_FORMATS,
    Attention,
    Collective,
    CollectiveKind,
    Gemm,
    GroupedGemm,
    HostSync,
    MemoryBound,
)

DUAL: dict[CollectiveKind, CollectiveKind] = {
    "all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_reduce": "all_reduce",
    "all_to_all": "all_to_all", "send_recv": "send_recv", "deepep": "deepep",
}  # fmt: skip

BEHIND = 6
"""Ops from an input gradient's product to the reduction of it at most: what is made of what was kept, the weight's
product, the addition of its gradient, views. [-]"""


class _Belonging(TypedDict):
    """What an op of a backward has of the forward's op that it differentiates."""

    part: Part
    step: LayerStep
    casts_for: str


def _belonging(op: Op) -> _Belonging:
    """The fields that tell to what of the model the op of a forward belongs."""
    return {"part": op.part, "step": op.step, "casts_for": op.casts_for}


def derived_backward_tape(forward: Tape, recompute: Recompute = NO_RECOMPUTE) -> Tape:
    """The backward tape of a forward tape.

    Its inputs are the gradients of the forward tape's outputs and whatever was kept; its outputs are the gradients of
    the forward inputs. Weight gradients come right after the input gradient that they share the output gradient with.
    """
    return _Differentiator(forward, recompute).run()


class _Differentiator(SavedTensorFinder):
    def __init__(self, forward: Tape, recompute: Recompute) -> None:
        super().__init__(forward, recompute)
        self.grads: dict[str, str] = {}
        self.given: dict[str, None] = {}
        self.lingers: tuple[str, ...] = ()
        self.sums: set[str] = set()

    def run(self) -> Tape:
        for name in self.forward.outputs:
            self.grads[name] = self._gradient(f"d:{name}", name)
        if self.recompute.kind == "full" and self.recompute.reentrant:
            self._replay("full")  # else what was kept is asked for first: nodes behind that keep nothing come before
        for op in reversed(self.forward.ops):
            group = self.group_of[op.name]
            if group in self.framed:
                if group in self.recompute.checkpoint and group not in self.replayed:
                    self._replay(group)  # a function of its own: all of it is made again before anything goes back
                self.given |= dict.fromkeys(self.grads[w] for w in self.framed[group].outputs if w in self.grads)
            began = len(self.ops)
            self._differentiate(op)
            self._issue(op, began)
            self.ops += self.let_go
            self.let_go = []
            if group in self.framed and op.name == self.framed[group].first_op:
                self._return_from(group)
        ops = tuple(self.ops)
        if self.recompute.early_stop:
            ops = without_unread_last_ops(ops)
        outputs = tuple(self.grads[name] for name in self.forward.inputs if name in self.grads)
        inputs = tuple(f"d:{name}" for name in self.forward.outputs)
        return Tape(ops, {**self.forward.tensors, **self.tensors}, inputs, outputs, self.lingers)

    def _issue(self, op: Op, began: int) -> None:
        """A module's call issues its way back too; autograd's sums are no part of it, nor what is made again."""
        for i in range(max(began - len(WEIGHT_ROLES), 0), len(self.ops)) if op.module_call is not None else ():
            new = self.ops[i]
            others = new.repeated or new.role == "sum"
            if new.module_call is None and (i >= began or new.stream == "tp") and not others:
                self.ops[i] = new._replace(module_call=op.module_call)

    def _return_from(self, group: str) -> None:
        """The end of a checkpoint's backward, up to which its frame holds what it has."""
        if group not in self.replayed and group != "full":
            return
        frame = self.framed[group]
        grads = tuple(self.given)
        again = tuple(f"{w}~" for w in frame.outputs if f"{w}~" in self.tensors)
        self.given = {}
        frame_tensors = tuple(h for n in frame.inputs if self.forward.tensors[n].grad and (h := self._frame_tensor(n)))
        self.ops.append(Op(f"{group} returns", "memory_bound", None, (*frame_tensors, *again, *grads), (), launches=0))
        if self.group_of.get(RENEWAL) == group:
            self.lingers = self._dispatcher_leftovers(frame)

    def _dispatcher_leftovers(self, frame: CheckpointGroup) -> tuple[str, ...]:
        """The gradient and the value of what a checkpoint around a dispatcher of tokens was given, as they go.

        The dispatcher keeps the probabilities that were made again, and by their graph the detached input at its end
        (megatron_core/transformer/moe/token_dispatcher.py, ``dispatch_preprocess``; tensor_parallel/random.py,
        ``CheckpointFunction.backward``). Where tokens go in chunks, those are inputs of a checkpoint of their own.
        """
        if any(map(is_token_chunk_region, self.group_of.values())):
            return ()
        names = [name for name in frame.inputs if name in self.grads]
        return tuple(n for name in names for n in (self.grads[name], self._frame_tensor(name)) if n)

    def _gradient(self, name: str, like: str) -> str:
        """Declare a gradient of ``like``, of its own size where the tensor says so."""
        _, nbytes, kind, _, grad_bytes, _, sent, *_ = self.forward.tensors[like]
        if grad_bytes is not None:
            nbytes, kind = grad_bytes, "activation"
        self.tensors[name] = Tensor(name, nbytes, kind, False, recorded_on_nccl_stream=sent)
        return name

    # -- gradients
    def _give(self, op: Op, name: str) -> str:
        """Name a new gradient of ``name``; a second one is added to the first."""
        if name not in self.grads:
            self.grads[name] = self._gradient(f"d:{name}", name)
            return self.grads[name]
        return self._gradient(f"d:{name}+{op.name}", name)

    def _settle(self, op: Op, name: str, given: str) -> None:
        """Add a second gradient to the first, as autograd accumulates: into the first's memory where nothing else holds
        it by then, as a checkpoint's frame does (torch/csrc/autograd/input_buffer.cpp, ``can_accumulate_inplace``)."""
        if self.grads[name] == given:
            return
        total = self._gradient(f"{given}=sum", name)
        # an absent op passes its input's gradient on, unless its output is a branch that has no bytes there
        outs = [self.forward.tensors[w] for w in op.writes]
        branch = sum(t.bytes if t.grad_bytes is None else t.grad_bytes for t in outs)
        gives = True if op.present is True else op.present | (branch > 0)
        in_place = self._root(self.grads[name]) not in self.given
        self.ops.append(
            Op(f"accumulate {name} at {op.name}", "memory_bound",
               MemoryBound(3.0 * self.tensors[total].bytes, "residual_add"), reads=(self.grads[name], given),
               writes=(total,), present=gives, view=in_place, launches=op.expert_loops, expert_loops=op.expert_loops,
               role="sum", step=op.step, casts_for=op.casts_for, sum_of=self.forward.tensors[name].use,
               adds_to_view=op.step == "folded_product" and self.grads[name] not in self.sums)
        )  # fmt: skip
        self.sums.add(total)
        self.grads[name] = total

    def _root(self, name: str) -> str:
        """The gradient whose memory a gradient is, as far as ops that never copy pass it on."""
        for op in reversed(self.ops) if self.given else ():
            if name in op.writes:
                if op.view is not True or not op.reads:
                    break
                name = op.reads[0]
        return name

    def _differentiable(self, op: Op) -> tuple[str, ...]:
        tensors = self.forward.tensors
        names = [name for name in op.reads if tensors[name].grad]
        return tuple(dict.fromkeys(names) if len(names) > 1 else names)

    def _differentiate(self, op: Op) -> None:
        dys = tuple([self.grads[w] for w in op.writes if w in self.grads])
        if not dys or isinstance(op.work, HostSync):
            return
        if isinstance(op.work, Gemm) and not op.weight:
            self._product(op, dys[0])
            return
        if isinstance(op.work, (Gemm, GroupedGemm)):
            self._linear(op, dys[0])
            return
        saved = tuple([self._saved(op, s) for s in op.saves])
        targets = self._differentiable(op)
        if not targets:
            if op.back is not None and any_true(op.back.launches):
                self._weight_only(op, dys, saved)
            return
        given = tuple([self._give(op, t) for t in targets])
        name = f"{op.name}.backward"
        if isinstance(op.work, Collective) and op.back is None:
            kind, group, payload, imbalance = op.work
            if kind == "all_reduce":  # forward sums partial results: the gradient is the same on every rank
                new = op._replace(name=name, family="memory_bound", work=None, reads=dys, writes=given, saves=(),
                                  scratch=0.0, launches=0, view=True, stream="compute", back=None,
                                  role="backward", origin=op.name)  # fmt: skip
            else:
                dual = Collective(DUAL[kind], group, payload, imbalance)
                new = op._replace(name=name, work=dual, reads=dys, writes=given, saves=(), scratch=0.0, view=False,
                                  back=None, role="backward", origin=op.name)  # fmt: skip
            self._launch(new)
        elif isinstance(op.work, Attention):
            back = op.back
            self.ops.append(
                Op(name, op.family, op.work.backward_work(), (*dys, *saved), given,
                   scratch=back.scratch if back else 0.0, launches=back.launches if back else 1, present=op.present,
                   stream=op.stream, autograd_functions=op.autograd_functions, guarded_calls=op.guarded_calls,
                   role="backward", origin=op.name,
                   **_belonging(op))
            )  # fmt: skip
        else:
            self._stream(op, name, dys, saved, given)
        for target, grad in zip(targets, given, strict=True):
            self._settle(op, target, grad)
        self._accumulate_weight(op)

    def _launch(self, op: Op) -> None:
        """Add an op; a linear layer's reduction of its input gradient goes before its weight gradient, which hides it.

        The unreduced gradient stays until the weight gradient is made (Megatron's tensor_parallel/layers.py,
        ``LinearWithGradAccumulationAndAsyncCommunication``; Transformer Engine's module/linear.py).
        """
        made = []
        if op.stream == "tp" and isinstance(op.work, Collective):
            last, dy = self.ops[-BEHIND:], op.reads[0]
            made = [i for i, other in enumerate(last) if other.role == "dgrad" and dy in other.writes]
        if not made:
            self.ops.append(op)
            return
        after = len(self.ops) - len(last) + made[0] + 1
        then = self.ops[after:]
        wgrad_index = next(i for i, other in enumerate(then) if other.role == "wgrad")
        then[wgrad_index] = then[wgrad_index]._replace(reads=(*then[wgrad_index].reads, op.reads[0]))
        self.ops[after:] = [op, *then]

    def _stream(self, op: Op, name: str, dys: tuple[str, ...], saved: tuple[str, ...], given: tuple[str, ...]) -> None:
        back = op.back
        if back is not None and back.work is not None:
            reads = (*saved, *dys) if back.overwrites_saved else (*dys, *saved)
            self._launch(
                Op(name, back.family or op.family, back.work, reads, given, scratch=back.scratch,
                   launches=back.launches, present=back.present, view=back.view, stream=back.stream,
                   autograd_functions=op.autograd_functions, guarded_calls=op.guarded_calls, order=back.order,
                   pool=back.pool, role="backward",
                   origin=op.name, **_belonging(op))
            )  # fmt: skip
        elif back is None or not any_true(back.launches):
            for i, g in enumerate(given):  # a view, an add: every gradient is the output's own
                self.ops.append(
                    Op(f"{name}.{i}", "memory_bound", None, (dys[0],), (g,), view=True, launches=0, **_belonging(op))
                )
        else:
            sibling_grads = tuple(self.grads[x] for x in back.held_outputs if x in self.grads)
            self.ops.append(
                Op(name, op.family, back.memory_bound_work(), (*dys, *sibling_grads, *saved), given,
                scratch=back.scratch,
                   launches=back.launches, present=op.present, stream=op.stream,
                   autograd_functions=op.autograd_functions,
                   guarded_calls=op.guarded_calls, expert_loops=op.expert_loops, autograd_nodes=back.autograd_nodes,
                   split_views=op.split_views,
                   order=back.order, pool=back.pool, role="backward", origin=op.name, **_belonging(op))
            )  # fmt: skip
            if back.held_copies:
                self.ops.append(Op(f"{name} returns", "memory_bound", None, back.held_copies, (), launches=0,
                                   present=back.holds_copies, **_belonging(op)))  # fmt: skip

    def _weight_only(self, op: Op, dys: tuple[str, ...], saved: tuple[str, ...]) -> None:
        assert op.back is not None
        grad = f"dW:{op.name}"
        self.tensors[grad] = Tensor(grad, op.weight_bytes, "grad", grad=False, weight=op.name)
        self.ops.append(
            Op(f"{op.name}.backward", op.family, op.back.memory_bound_work(), (*dys, *saved), (grad,),
               scratch=op.back.scratch, launches=op.back.launches, present=op.present, role="backward", origin=op.name,
               purpose="embedding_gradient" if op.purpose == "embedding" else "", **_belonging(op))
        )  # fmt: skip
        self._accumulate_weight(op, grad)

    def _linear(self, op: Op, dy: str) -> None:
        work = op.work
        assert isinstance(work, (Gemm, GroupedGemm))
        (x,) = self._differentiable(op)[:1] or ("",)
        saved = [self._saved(op, s) for s in op.saves]
        again: list[str] = []
        of_grad, of_weight = dy, dy
        prepared, names = op.backward_preparation, {GRADIENT: dy, **dict(zip(op.saves, saved, strict=True))}
        if prepared is not None:
            self._prepare(op, (*prepared.gradient, *prepared.before_dgrad), names)
            of_grad = names.get(prepared.dgrad, prepared.dgrad)
        for gather in op.regather:
            source = next(o for o in self.forward.ops if o.name == gather)
            name = f"{source.writes[0]}@{op.name}"
            self._tensor(name, source.writes[0])
            self.ops.append(
                source._replace(
                    name=f"{gather} again for {op.name}", reads=(saved[0],), writes=(name,), saves=(), role="regather"
                )
            )
            again.append(name)
        formats = BACK_FORMATS.get(work.format, (work.format, work.format))
        if x:
            given = self._give(op, x)
            if isinstance(work, Gemm):
                dgrad: Gemm | GroupedGemm = Gemm(work.m, work.k, work.n, formats[0], work.count, "dgrad")
            else:
                dgrad = replace(work, n=work.k, k=work.n, format=formats[0])
            self.ops.append(
                Op(f"{op.name}.dgrad", op.family, dgrad, (of_grad,), (given,), launches=op.launches, present=op.present,
                   autograd_functions=op.autograd_functions, guarded_calls=op.guarded_calls,
                   kernel_choices=op.kernel_choices, kernel_loads=op.kernel_loads,
                   mean_loops_before=op.mean_loops_before, expert_loops=op.expert_loops, role="dgrad", origin=op.name,
                   **_belonging(op))
            )  # fmt: skip
        if prepared is not None:
            self._prepare(op, prepared.after_dgrad, names)
            of_weight = names.get(prepared.wgrad, prepared.wgrad)
            again = [names.get(prepared.input, prepared.input)] if prepared.input else again
        if isinstance(work, Gemm):
            wgrad: Gemm | GroupedGemm = Gemm(work.n, work.k, work.m, formats[1], work.count, "wgrad")
        else:
            wgrad = replace(work, wgrad=True, format=formats[1])
        grad = f"dW:{op.name}"
        self.tensors[grad] = Tensor(grad, op.weight_bytes, "grad", grad=False, weight=op.name)
        reads = (of_weight, *(again or saved), *((dy,) if of_weight != dy else ()))
        self.ops.append(
            Op(f"{op.name}.wgrad", op.family, wgrad, reads, (grad,), launches=op.launches, present=op.present,
               kernel_choices=op.kernel_choices, expert_loops=op.expert_loops, role="wgrad", origin=op.name,
               **_belonging(op))
        )  # fmt: skip
        self._accumulate_weight(op, grad)
        if x:
            self._settle(op, x, given)

    def _prepare(self, op: Op, ops: tuple[Op, ...], names: dict[str, str]) -> None:
        """Add what a linear layer does before its products; ``names`` grows by what runs nowhere and is its input."""
        for preparation in ops:
            present = preparation.present & op.present
            reads = tuple(names.get(r, r) for r in preparation.reads)
            if any_true(present):
                self.ops.append(preparation._replace(reads=reads, present=present, part=op.part))
            elif preparation.writes:
                names[preparation.writes[0]] = reads[0]

    def _product(self, op: Op, dy: str) -> None:
        """A product of two activations, C = A B: dA = dC B^T and dB = A^T dC, each of the forward's FLOPs."""
        work = op.work
        assert isinstance(work, Gemm) and len(op.reads) == 2 and op.saves == op.reads
        left, right = op.reads
        sides = (
            (left, right, Gemm(work.m, work.k, work.n, work.format, work.count, "dgrad"), "dleft"),
            (right, left, Gemm(work.k, work.n, work.m, work.format, work.count, "wgrad"), "dright"),
        )
        for target, other, product, name in sides:
            given = self._give(op, target)
            self.ops.append(
                Op(f"{op.name}.{name}", op.family, product, (dy, self._saved(op, other)), (given,),
                   launches=op.launches, present=op.present, region=op.region, role="backward", origin=op.name,
                   **_belonging(op))
            )  # fmt: skip
            self._settle(op, target, given)

    def _accumulate_weight(self, op: Op, grad: str = "") -> None:
        """Add a weight gradient to the main gradient: read it, read and write the main one.

        A gradient that is made apart takes a kernel. A product that adds its result itself takes the time of the bytes
        that its result has more, at the end of each tile, where nothing hides them. On an H200, 17 products of 2048 to
        16384 tokens take 1.25 ps an element longer (median) if they add to fp32 than if they write bf16: 6 bytes at its
        memory's 4.8 TB/s. SimuMax's 40 pairs on a B200 say 0.7 ps.
        """
        if not op.accumulate_bytes_per_param or not any_true(op.weight_params):
            return
        fused = not any_true(op.weight_bytes)
        self.ops.append(
            Op(f"{op.name}.accumulate", op.family if fused else "memory_bound",
               MemoryBound(op.accumulate_bytes_per_param * op.weight_params, "te wgrad_add" if fused else "accumulate"),
               reads=(grad,) if grad else (), launches=0 if fused else op.num_weights, expert_loops=op.expert_loops,
               role="accumulate", origin=op.name, **_belonging(op))
        )  # fmt: skip
