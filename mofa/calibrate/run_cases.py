"""`mofa calibrate run`: time every case that is not in the folder yet, row by row."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mofa.calibrate.cases import Bench, Case, UnsupportedCase, UnsupportedFamily
from mofa.calibrate.measurements import ENVIRONMENT, append_row, read_rows_of_file
from mofa.calibrate.shapes.families import (
    COLLECTIVE_FAMILIES,
    FAMILIES,
    ONE_GPU_FAMILIES,
    SEVERAL_GPU_FAMILIES,
    all_cases_of_family,
)
from mofa.calibrate.shapes.te_bf16 import TE_BF16_FAMILIES
from mofa.errors import SpecError

LAYERS = "chunked_moe"
SPAWNED = (*COLLECTIVE_FAMILIES, LAYERS)
"""Families that take a process per GPU."""
Progress = Callable[[int, int, str], None]
"""Called with cases done, cases in all, and what is being timed."""


def measure_cases(
    out: Path,
    *,
    quick: bool = False,
    full: bool = False,
    families: Sequence[str] | None = None,
    device: str = "auto",
    progress: Progress | None = None,
    gpus: int | None = None,
    limit_s: float | None = None,
    fresh: bool = False,
    fresh_only: bool = False,
) -> dict[str, int]:
    """Measure into ``out``; rows that it already holds are kept and not measured again.

    Parameters
    ----------
    quick
        A quarter of the cases: about two minutes on one GPU. ``full`` measures all, in about six minutes; without
        either, half of the grid and all held-out shapes.
    families
        Only these; see `mofa.calibrate.shapes.families.FAMILIES`. Whole MoE layers (``chunked_moe``) must be named;
        Transformer Engine's are measured where it is installed.
    device
        ``auto`` and ``cuda`` need a GPU; ``cpu`` times NumPy through the same interface.
    fresh
        Also the second held-out set; see `mofa.calibrate.cases.FRESH_SEED`.
    fresh_only
        Nothing but the second held-out set.
    limit_s
        Stop, with every row so far kept, after so many seconds. [s]

    Returns
    -------
    dict[str, int]
        How many cases were ``measured``, ``kept`` from before, ``unsupported`` and ``left``.

    Raises
    ------
    SpecError
        Without a GPU, on an unknown family, on a folder of another GPU, on corrupt rows.
    """
    if quick and full:
        raise SpecError("--quick and --full exclude each other; give one of them")
    unknown = sorted(set(families or ()) - set(FAMILIES))
    if unknown:
        raise SpecError(f"--families: unknown {', '.join(unknown)}; choose from {', '.join(FAMILIES)}")
    bench = open_bench(device)
    count = num_gpus(bench) if gpus is None else gpus
    on_host = str(bench.environment().get("device")) == "cpu"
    every = _cases_of(
        _families_of(bench, count, families), quick=quick, full=full, gpus=count, layer_gpus=0 if on_host else count,
        fresh=fresh or fresh_only,
    )  # fmt: skip
    todo = [c for c in every if c.split == "fresh" or not fresh_only]
    host = anonymous_machine_id(str(bench.environment().get("gpu_ids", "")))
    done = prepare_folder_and_list_measured_cases(out, bench, host)
    left = [c for c in todo if c.identity not in done]
    counts = {"measured": 0, "kept": len(todo) - len(left), "unsupported": 0, "left": 0}
    tell = progress or _tell_nobody
    single = [c for c in left if c.family not in SPAWNED]
    several = [c for c in left if c.family in COLLECTIVE_FAMILIES]
    layers = [c for c in left if c.family == LAYERS]
    skipped = _measure_singly(single, bench, out, host, limit_s, counts, len(left), tell)
    if several and not counts["left"] and count > 1:
        _measure_several(
            several,
            todo,
            out,
            host,
            count,
            lambda rows: tell(len(single) + rows, len(left), f"collectives on {count} GPUs"),
        )
        counts["measured"] += len(several)
    if layers and not counts["left"]:

        def passed(rows: int) -> None:
            tell(len(left) - len(layers) + min(rows, len(layers)), len(left), "MoE layers in token chunks")

        ran = _measure_layers(layers, out, host, "cpu" if on_host else "cuda", passed)
        counts["measured" if ran else "unsupported"] += len(layers)
    if skipped:
        (out / "unsupported.txt").write_text("\n".join(skipped) + "\n", encoding="utf-8")
    tell(len(left), len(left), "done")
    return counts


def _tell_nobody(done: int, total: int, what: str) -> None:
    """Progress that nobody asked for."""


def _families_of(bench: Bench, gpus: int, named: Sequence[str] | None) -> list[str]:
    """The families to measure: those named, else the usual ones of so many GPUs and of what is installed."""
    usual = ONE_GPU_FAMILIES if gpus < 2 else SEVERAL_GPU_FAMILIES
    wanted = named or (*usual, *(TE_BF16_FAMILIES if bench.environment().get("transformer_engine") else ()))
    return [family for family in FAMILIES if family in wanted]


def _cases_of(
    families: Sequence[str], *, quick: bool, full: bool, gpus: int, layer_gpus: int, fresh: bool
) -> list[Case]:  # fmt: skip
    """Every case of some families; whole layers are measured on ``layer_gpus``."""
    return [
        case
        for family in families
        for case in all_cases_of_family(
            family, quick=quick, full=full, gpus=layer_gpus if family == LAYERS else gpus, fresh=fresh
        )
    ]  # fmt: skip


def _measure_singly(
    single: Sequence[Case], bench: Bench, out: Path, host: str, limit_s: float | None, counts: dict[str, int],
    num_left: int, tell: Progress,
) -> list[str]:  # fmt: skip
    """Time cases in this process until the limit, and count them; returns those that do not run here, and why."""
    started = time.monotonic()
    skipped: list[str] = []
    unsupported_families: set[str] = set()
    for i, case in enumerate(single):
        if limit_s is not None and time.monotonic() - started > limit_s:
            counts["left"] = num_left - i
            break
        if case.family in unsupported_families:
            counts["unsupported"] += 1
            continue
        tell(i, num_left, f"{case.family} {case.op} {case.shape_text[:60]}")
        try:
            sample = bench.time_case(case)
        except UnsupportedFamily as error:
            counts["unsupported"] += 1
            unsupported_families.add(case.family)
            skipped.append(f"{case.family}, all of it: {error}")
            continue
        except UnsupportedCase as error:
            counts["unsupported"] += 1
            skipped.append(f"{case.family} {case.op} {case.variant} {case.shape_text[:80]}: {error}")
            continue
        append_row(out, case, sample, bench.gpu, host)
        counts["measured"] += 1
    return skipped


def _measure_several(
    several: Sequence[Case], todo: Sequence[Case], out: Path, host: str, gpus: int, came: Callable[[int], None]
) -> None:  # fmt: skip
    """Time collectives, a process per GPU, and write down which algorithms NCCL chose for all of them."""
    from mofa.calibrate.bench.collectives import measure_collectives
    from mofa.calibrate.bench.nccl_choice import write_nccl_choices

    came(0)
    measure_collectives(several, out, host, gpus, progress=lambda rows: came(min(rows, len(several))))
    if any(c.family == "collective" for c in several):
        write_nccl_choices([c for c in todo if c.family == "collective"], out, gpus)


def _measure_layers(layers: Sequence[Case], out: Path, host: str, device: str, progress: Callable[[int], None]) -> bool:
    """Chunked MoE layers, one process a rank; false without torch, which a host may lack."""
    try:
        from mofa.calibrate.bench.chunked_ranks import measure_chunked_layers_on_ranks
    except ImportError:
        return False
    progress(0)
    measure_chunked_layers_on_ranks(
        layers, out, host, max(c.shape_size("ep") for c in layers), device=device, progress=progress
    )
    return True


def open_bench(device: str) -> Bench:
    """The bench of a device; without a GPU one clear line."""
    if device == "cpu":
        from mofa.calibrate.bench.numpy_bench import NumpyBench

        host: Bench = NumpyBench()
        return host
    if device not in ("auto", "cuda"):
        raise SpecError(f"--device: {device!r} is unknown; choose cuda or cpu")
    try:
        import torch
    except ImportError:
        raise SpecError(
            "mofa calibrate run: torch is not installed; pip install 'mofa[gpu]' on the GPU machine"
        ) from None
    if not torch.cuda.is_available():
        raise SpecError("mofa calibrate run: no CUDA device found; run it on the GPU machine, or try --device cpu")
    from mofa.calibrate.bench.torch_bench import TorchBench

    bench: Bench = TorchBench("cuda")
    return bench


def why_gpu_cannot_be_timed() -> str | None:
    """What a machine lacks to time a GPU, in words; None where it lacks nothing."""
    try:
        import torch
    except ImportError:
        return "torch is not installed (pip install 'mofa[gpu]')"
    return None if torch.cuda.is_available() else "torch finds no CUDA or ROCm device"


def num_gpus(bench: Bench) -> int:
    """GPUs that this machine has."""
    count = bench.environment().get("num_gpus", 1)
    return count if isinstance(count, int) else 1


def anonymous_machine_id(gpu_ids: str = "") -> str:
    """A short name that tells machines apart without naming them; virtual ones by their GPUs."""
    return "host-" + hashlib.sha256(f"{platform.node()} {platform.version()} {gpu_ids}".encode()).hexdigest()[:6]


def prepare_folder_and_list_measured_cases(out: Path, bench: Bench, host: str) -> set[tuple[str, str, str, str, str]]:
    """Make the folder, write environment.json, and say which cases are there already."""
    out.mkdir(parents=True, exist_ok=True)
    done = set()
    for path in sorted(out.glob("*.csv")):
        rows = read_rows_of_file(path)
        for row in rows:
            if row.gpu != bench.gpu:
                raise SpecError(
                    f"{path}: holds rows of {row.gpu!r}, this machine has {bench.gpu!r}; choose another --out"
                )
            done.add(row.case.identity)
    environment = {**bench.environment(), "host": host}
    temporary = out / f".{ENVIRONMENT}.part"  # a whole file or none
    temporary.write_text(json.dumps(environment, indent=1) + "\n", encoding="utf-8")
    temporary.replace(out / ENVIRONMENT)
    return done
