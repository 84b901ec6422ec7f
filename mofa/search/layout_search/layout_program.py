"""The CP-SAT program of a split: the longest of known paths as short as can be, every rank within its memory.

Variables are where each chunk begins along the model. What a chunk has of a kind of layer is a difference of how many
are ahead of two such places, so that all that chunks take and keep is linear.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mofa.cost.step_time.longest_paths import ComputationPath
from mofa.search.layout_search.split_problem import ALL, ChunkLayers, FloatA, IntA, LayerSplitProblem

STEP_UNITS, RANK_UNITS, LIMIT_UNITS = 50_000, 4_000, 10_000
"""Units of the longest step of interest, of the heaviest rank that it allows, and of what a rank may hold: to what
times and bytes are rounded down. [-]"""
CLOSE = 5e-4
"""Share of a step by which the solver may leave it above its bound. [-]"""
Aim = Literal["heaviest rank", "heaviest chunks", "step"]
"""What is made shortest: the heaviest rank; the heaviest of all ranks' first chunks, of their second ones and so on,
which take turns; or the longest known path."""


@dataclass(frozen=True)
class LayoutProgramSolution:
    """A split, its aim's value as the program knows it, and a lower bound of that. [s]"""

    split: ChunkLayers
    value_s: float
    bound_s: float


class LayoutIntegerProgram:
    """An integer program that deals out layers to chunks; it learns paths, and contents of ranks that do not fit.

    Parameters
    ----------
    at_most_s
        The longest step that is of interest. [s]
    over_limit
        By how much memory that is linear in layers may pass the limit, as a share: contents that do not fit are
        forbidden one by one.
    """

    def __init__(self, problem: LayerSplitProblem, at_most_s: float, *, over_limit: float = 0.0) -> None:
        from ortools.sat.python import cp_model

        self.problem, self.cp_model = problem, cp_model
        self.model: Any = cp_model.CpModel()
        self.step_unit_s = at_most_s / STEP_UNITS
        self.is_exhausted = False
        """Whether no split is left."""
        self._place_layers()
        self._place_predictions()
        self._fit(problem.limit_bytes * (1.0 + over_limit))
        self._aims: dict[Aim, tuple[Any, float]] = {
            "step": (self.model.new_int_var(0, STEP_UNITS, ""), self.step_unit_s)
        }

    def _place_layers(self) -> None:
        """Where chunks begin and end, where what is recomputed of them ends, and the layers ahead of each."""
        problem, model, number = self.problem, self.model, self.problem.num_layers
        chunks = problem.num_chunks
        rest = [*np.cumsum(problem.least_layers[::-1])[::-1].tolist(), 0]
        ahead = [0, *np.cumsum(problem.least_layers).tolist()]
        self._begins = [model.new_int_var(ahead[p], number - rest[p], "") for p in range(chunks + 1)]
        model.add(self._begins[0] == 0)
        model.add(self._begins[-1] == number)
        for p, least in enumerate(problem.least_layers):
            model.add(self._begins[p + 1] >= self._begins[p] + least)
        self._recomputed: Any = None
        if problem.most_recomputed == ALL:
            ends = self._begins[1:]
        elif problem.most_recomputed == 0:
            ends = self._begins[:-1]
        else:
            self._recomputed = model.new_int_var(problem.least_recomputed, problem.most_recomputed, "")
            ends = [model.new_int_var(0, number, "") for _ in range(chunks)]
            for p, end in enumerate(ends):
                model.add_min_equality(end, [self._begins[p] + self._recomputed, self._begins[p + 1]])
        self._ahead: dict[int, list[Any]] = {}
        begins = [self._layers_ahead(place) for place in self._begins]
        until = [self._layers_ahead(place) for place in ends]
        self._counts = [
            [
                (self._count(begins[p + 1][k] - until[p][k]), self._count(until[p][k] - begins[p][k]))
                for k in range(problem.num_layer_kinds)
            ]
            for p in range(chunks)
        ]  # fmt: skip
        for k, total in enumerate(problem.kind_prefix_counts[:, -1].tolist()):
            model.add(sum(mode for chunk in self._counts for mode in chunk[k]) == total)

    def _count(self, difference: Any) -> Any:
        """A variable for a number of layers, whose bounds the solver narrows by itself; 0 where there are none."""
        if isinstance(difference, int):
            return difference
        count = self.model.new_int_var(0, self.problem.num_layers, "")
        self.model.add(count == difference)
        return count

    def _layers_ahead(self, place: Any) -> list[Any]:
        """How many layers of each kind are ahead of a place; of the most frequent kind all that are none of others."""
        known = self._ahead.get(place.index)
        if known is None:
            of_kind = [self._ahead_of_kind(place, kind) for kind in range(self.problem.num_layer_kinds)]
            most = self.problem.most_frequent_kind
            of_kind[most] = place - sum(of_kind[:most] + of_kind[most + 1 :])
            known = self._ahead[place.index] = of_kind
        return known

    def _ahead_of_kind(self, place: Any, kind: int) -> Any:
        """How many layers of a kind are ahead of a place: of each run of them none, some or all; 0 for the most
        frequent kind."""
        if kind == self.problem.most_frequent_kind:
            return 0
        total: Any = 0
        for start, length in self.problem.consecutive_layers_of_kind(kind):
            ahead = self.model.new_int_var(0, length, "")
            behind_start: Any = place
            if start:
                behind_start = self.model.new_int_var(0, self.problem.num_layers - start, "")
                self.model.add_max_equality(behind_start, [place - start, 0])
            self.model.add_min_equality(ahead, [behind_start, length])
            total = total + ahead
        return total

    def _place_predictions(self) -> None:
        """In which chunk predictions are: behind the last layer, all together."""
        problem, model = self.problem, self.model
        first = problem.first_prediction_chunk if problem.num_predictions else problem.num_chunks - 1
        self._has_predictions = {p: model.new_bool_var("") for p in range(first, problem.num_chunks)}
        model.add_exactly_one(self._has_predictions.values())
        for p, there in self._has_predictions.items():
            model.add(self._begins[p + 1] == problem.num_layers).only_enforce_if(there)
        self._is_filled: list[Any] = []
        for p in range(problem.num_chunks):
            if p in (0, problem.num_chunks - 1) or problem.least_layers[p]:
                self._is_filled.append(1)
                continue
            filled = model.new_bool_var("")
            model.add(self._begins[p + 1] == self._begins[p]).only_enforce_if(~filled)
            if p in self._has_predictions:
                model.add_implication(self._has_predictions[p], filled)
            self._is_filled.append(filled)

    def _fit(self, limit_bytes: float) -> None:
        """Give every rank something to hold, within its memory as far as that is linear in layers."""
        problem = self.problem
        unit = problem.limit_bytes / LIMIT_UNITS
        for rank in range(len(problem.bytes_without_layers)):
            total = int(np.floor(problem.bytes_without_layers[rank] / unit)) + sum(
                self._of_chunk(p, problem.layer_bytes[p], problem.prediction_bytes[p], unit)
                for p in problem.chunks_of_rank(rank)
            )
            self.model.add(total <= int(np.ceil(limit_bytes / unit)))
            if not problem.has_embedding_or_head(rank):
                filled = [there for p, there in self._has_predictions.items() if p in problem.chunks_of_rank(rank)]
                layers = [self._begins[p + 1] - self._begins[p] for p in problem.chunks_of_rank(rank)]
                self.model.add(sum(layers) + (sum(filled) if problem.num_predictions else 0) >= 1)

    def _of_chunk(self, chunk: int, of_layers: FloatA, of_predictions: float, unit: float) -> Any:
        """A quantity of a chunk's layers, (K, 2), and of the predictions, where they are there."""
        each: IntA = np.floor(of_layers / unit).astype(np.int64)
        total: Any = sum(
            int(each[k, mode]) * count
            for k, counts in enumerate(self._counts[chunk])
            for mode, count in enumerate(counts)
            if each[k, mode]
        )
        if chunk in self._has_predictions:
            total = total + int(of_predictions / unit) * self._has_predictions[chunk]
        return total

    def add_path_constraint(self, path: ComputationPath) -> None:
        """Let the step take as long as a path at least."""
        problem, pipeline, unit_s = self.problem, self.problem.schedule_clock, self.step_unit_s
        rank, number = problem.chunk_places
        counts, beside_hops = path.counts[:, rank, number], path.beside_hops[rank, number]
        of_chunks = np.floor(np.einsum("cp,cp->p", counts, problem.chunk_s) / unit_s)
        of_layers = np.floor(np.einsum("cp,cpkm->pkm", counts, problem.layer_s) / unit_s)
        of_predictions = np.floor(np.einsum("cp,cp->p", counts, problem.prediction_s) / unit_s)
        beside = np.floor(beside_hops * pipeline.slowdown * pipeline.hop_s / unit_s)
        weights = np.concatenate([of_layers.ravel(), of_predictions, beside]).astype(np.int64)
        fixed = int(path.hops * pipeline.hop_s / unit_s) + int(of_chunks.sum())
        variables, constants, is_variable = self._terms
        some = np.flatnonzero(is_variable & (weights != 0))
        total = self.cp_model.LinearExpr.weighted_sum(
            [variables[i] for i in some.tolist()], weights[some].tolist()
        )  # fmt: skip
        self.model.add(self._aims["step"][0] >= total + (fixed + int(weights @ constants)))

    @cached_property
    def _terms(self) -> tuple[list[Any], IntA, NDArray[np.bool_]]:
        """What paths have weights for: layers by chunk, kind and mode, predictions by chunk, chunks that are filled.

        Each is a variable or a constant: the list of all, the values of constants, and which are variables.
        """
        terms = [count for chunk in self._counts for kind in chunk for count in kind]
        terms += [self._has_predictions.get(p, 0) for p in range(self.problem.num_chunks)]
        terms += self._is_filled
        is_variable = np.array([not isinstance(term, int) for term in terms])
        constants = np.array([term if isinstance(term, int) else 0 for term in terms], dtype=np.int64)
        return terms, constants, is_variable

    def _aim(self, aim: Aim) -> tuple[Any, float]:
        """The variable of an aim, and its unit. [s]"""
        known = self._aims.get(aim)
        if known is not None:
            return known
        problem, model = self.problem, self.model
        unit_s = problem.heaviest_rank_micro_batch_s(problem.even_split()) / RANK_UNITS
        rank, number = problem.chunk_places
        chunk_s, layer_s, prediction_s = (
            of[: problem.schedule_clock.num_computations].sum(axis=0)
            for of in (problem.chunk_s, problem.layer_s, problem.prediction_s)
        )
        each = [
            int(chunk_s[p] / unit_s) + self._of_chunk(p, layer_s[p], float(prediction_s[p]), unit_s)
            for p in range(problem.num_chunks)
        ]
        most = len(problem.bytes_without_layers) * RANK_UNITS
        groups = rank if aim == "heaviest rank" else number
        of_groups = []
        for group in range(int(groups.max()) + 1):
            of_group = [each[p] for p in np.flatnonzero(groups == group)]
            if aim == "heaviest rank":
                of_groups.append(sum(of_group))
            else:
                heaviest = model.new_int_var(0, most, "")
                for chunk in of_group:
                    model.add(heaviest >= chunk)
                of_groups.append(heaviest)
        variable = model.new_int_var(0, most, "")
        for total in of_groups if aim == "heaviest rank" else [sum(of_groups)]:
            model.add(variable >= total)
        self._aims[aim] = variable, unit_s
        return variable, unit_s

    def add_upper_bound(self, aim: Aim, value_s: float) -> None:
        """Let an aim be no longer than it was found to be."""
        variable, unit_s = self._aim(aim)
        self.model.add(variable <= round(value_s / unit_s))

    def forbid_rank_contents(self, rank: int, split: ChunkLayers) -> None:
        """Forbid that a rank has all that it has in a split, and maybe more."""
        problem = self.problem
        less = []
        counts = problem.layer_counts([split])[0].tolist()
        for p in problem.chunks_of_rank(rank):
            for k in range(problem.num_layer_kinds):
                for mode in range(2):
                    if counts[p][k][mode]:
                        lower = self.model.new_bool_var("")
                        self.model.add(self._counts[p][k][mode] <= counts[p][k][mode] - 1).only_enforce_if(lower)
                        less.append(lower)
            if problem.num_predictions and p == split.prediction_chunk:
                less.append(~self._has_predictions[p])
        self.model.add_bool_or(less)

    def exclude_split(self, split: ChunkLayers) -> None:
        """Leave a split out, whose step is known."""
        model, differs = self.model, [~self._has_predictions[split.prediction_chunk]]
        places = [*zip(self._begins[1:-1], np.cumsum(split.layers[:-1]).tolist(), strict=True)]
        if self._recomputed is not None:
            places.append((self._recomputed, split.recomputed))
        for variable, value in places:
            other = model.new_bool_var("")
            model.add(variable != value).only_enforce_if(other)
            differs.append(other)
        model.add_bool_or(differs)

    def solve(self, aim: Aim, hint: ChunkLayers, seed: int, work: float) -> tuple[LayoutProgramSolution | None, float]:
        """A split that an aim is shortest for, None where none was found, and the work that it took.

        Parameters
        ----------
        hint
            A split to begin with.
        seed, work
            Of the solver, and its limit: deterministic, so that a machine's load decides nothing. [-], [s]
        """
        variable, unit_s = self._aim(aim)
        self.model.clear_objective()
        self.model.minimize(variable)
        solver: Any = self.cp_model.CpSolver()
        solver.parameters.catch_sigint_signal = False  # else Ctrl-C ends the process at once from the first program on
        solver.parameters.max_deterministic_time = work
        solver.parameters.random_seed = seed
        solver.parameters.num_workers = 1
        solver.parameters.relative_gap_limit = CLOSE if aim == "step" else 0.0
        self.model.clear_hints()
        for begin, place in zip(self._begins, np.concatenate([[0], np.cumsum(hint.layers)]).tolist(), strict=True):
            self.model.add_hint(begin, place)
        status = solver.solve(self.model)
        spent = float(solver.response_proto.deterministic_time)
        self.is_exhausted = status == self.cp_model.INFEASIBLE
        if status not in (self.cp_model.OPTIMAL, self.cp_model.FEASIBLE):
            return None, spent
        places = [solver.value(begin) for begin in self._begins]
        recomputed = self.problem.most_recomputed if self._recomputed is None else solver.value(self._recomputed)
        chunk = next(p for p, there in self._has_predictions.items() if solver.value(there))
        split = ChunkLayers(tuple(np.diff(places).tolist()), chunk, int(recomputed))
        value, bound = solver.objective_value * unit_s, solver.best_objective_bound * unit_s
        return LayoutProgramSolution(split, float(value), float(bound)), spent
