"""`mofa calibrate run`: time every case that is not in the folder yet, row by row."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mofa.calibrate.cases import Bench, Case, Unsupported
from mofa.calibrate.measurements import ENVIRONMENT, append_row, read_file
from mofa.calibrate.shapes import FAMILIES, ONE_GPU_FAMILIES, SEVERAL_GPU_FAMILIES, cases
from mofa.calibrate.shapes_te_bf16 import TE_BF16_FAMILIES
from mofa.errors import SpecError

LAYERS = "chunked_moe"
SPAWNED = ("collective", "overlap", LAYERS)
"""Families that take a process per GPU."""
Progress = Callable[[int, int, str], None]
"""Called with cases done, cases in all, and what is being timed."""


def run(
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
        Only these; see `mofa.calibrate.shapes.FAMILIES`. Whole MoE layers (``chunked_moe``) must be named; Transformer
        Engine's are measured where it is installed.
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
    found = num_gpus(bench) if gpus is None else gpus
    usual = ONE_GPU_FAMILIES if found < 2 else SEVERAL_GPU_FAMILIES
    wanted = families or (*usual, *(TE_BF16_FAMILIES if bench.environment().get("transformer_engine") else ()))
    chosen = [family for family in FAMILIES if family in wanted]
    on_host = str(bench.environment().get("device")) == "cpu"
    of_layers = 0 if on_host else found
    todo = [
        c
        for family in chosen
        for c in cases(
            family,
            quick=quick,
            full=full,
            gpus=of_layers if family == LAYERS else found,
            fresh=fresh or fresh_only,
        )
        if c.split == "fresh" or not fresh_only
    ]
    host = host_id(str(bench.environment().get("gpu_ids", "")))
    done = prepare(out, bench, host)
    left = [c for c in todo if c.key not in done]
    counts = {"measured": 0, "kept": len(todo) - len(left), "unsupported": 0, "left": 0}
    started = time.monotonic()
    single = [c for c in left if c.family not in SPAWNED]
    skipped: list[str] = []
    for i, case in enumerate(single):
        if limit_s is not None and time.monotonic() - started > limit_s:
            counts["left"] = len(left) - i
            break
        if progress is not None:
            progress(i, len(left), f"{case.family} {case.op} {case.shape_text[:60]}")
        try:
            sample = bench.measure(case)
        except Unsupported as error:
            counts["unsupported"] += 1
            skipped.append(f"{case.family} {case.op} {case.variant} {case.shape_text[:80]}: {error}")
            continue
        append_row(out, case, sample, bench.gpu, host)
        counts["measured"] += 1
    several = [c for c in left if c.family in ("collective", "overlap")]
    if several and not counts["left"] and found > 1:
        if progress is not None:
            progress(len(single), len(left), f"collectives on {found} GPUs")
        from mofa.calibrate.bench.collectives import measure_collectives
        from mofa.calibrate.bench.nccl_choice import write_choices

        def came(rows: int) -> None:
            if progress is not None:
                progress(len(single) + min(rows, len(several)), len(left), f"collectives on {found} GPUs")

        measure_collectives(several, out, host, found, progress=came)
        counts["measured"] += len(several)
        if any(c.family == "collective" for c in several):
            write_choices([c for c in todo if c.family == "collective"], out, found)
    layers = [c for c in left if c.family == LAYERS]
    if layers and not counts["left"]:

        def passed(done: int) -> None:
            if progress is not None:
                progress(len(left) - len(layers) + min(done, len(layers)), len(left), "MoE layers in token chunks")

        ran = _measure_layers(layers, out, host, "cpu" if on_host else "cuda", passed)
        counts["measured" if ran else "unsupported"] += len(layers)
    if skipped:
        (out / "unsupported.txt").write_text("\n".join(skipped) + "\n", encoding="utf-8")
    if progress is not None:
        progress(len(left), len(left), "done")
    return counts


def _measure_layers(layers: Sequence[Case], out: Path, host: str, device: str, progress: Callable[[int], None]) -> bool:
    """Chunked MoE layers, one process a rank; false without torch, which a host may lack."""
    try:
        from mofa.calibrate.bench.chunked_ranks import measure_chunked
    except ImportError:
        return False
    progress(0)
    measure_chunked(layers, out, host, max(c.size("ep") for c in layers), device=device, progress=progress)
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


def num_gpus(bench: Bench) -> int:
    """GPUs that this machine has."""
    found = bench.environment().get("num_gpus", 1)
    return found if isinstance(found, int) else 1


def host_id(gpu_ids: str = "") -> str:
    """A short name that tells machines apart without naming them; virtual ones by their GPUs."""
    return "host-" + hashlib.sha256(f"{platform.node()} {platform.version()} {gpu_ids}".encode()).hexdigest()[:6]


def prepare(out: Path, bench: Bench, host: str) -> set[tuple[str, str, str, str, str]]:
    """Make the folder, write environment.json, and say which cases are there already."""
    out.mkdir(parents=True, exist_ok=True)
    done = set()
    for path in sorted(out.glob("*.csv")):
        rows = read_file(path)
        for row in rows:
            if row.gpu != bench.gpu:
                raise SpecError(
                    f"{path}: holds rows of {row.gpu!r}, this machine has {bench.gpu!r}; choose another --out"
                )
            done.add(row.case.key)
    environment = {**bench.environment(), "host": host}
    temporary = out / f".{ENVIRONMENT}.part"  # a whole file or none
    temporary.write_text(json.dumps(environment, indent=1) + "\n", encoding="utf-8")
    temporary.replace(out / ENVIRONMENT)
    return done
