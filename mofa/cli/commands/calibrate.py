"""``mofa calibrate``: measure a machine, fit its profile, add nccl-tests, and check what the fit predicts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from mofa.cli import options as opt
from mofa.cli.command_groups import UncutCommandList

calibrate = typer.Typer(
    cls=UncutCommandList,
    help="Measure a GPU machine and make the profile that plan uses.",
    rich_markup_mode=None,
    add_completion=False,
)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names of profiles: they become file names."""


class DeviceChoice(StrEnum):
    """Which device is timed."""

    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


Folders = Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="What `mofa calibrate run --out` wrote.")]


@calibrate.command("run")
def calibrate_run(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of measurements; its rows are kept.")],
    quick: Annotated[bool, typer.Option("--quick", help="A quarter of the shapes: 2 minutes on one GPU.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every shape: under 9 minutes.")] = False,
    families: Annotated[
        list[str] | None,
        typer.Option("--families", metavar="A,B", help="Only these, such as gemm,attention. Repeatable."),
    ] = None,
    device: Annotated[
        DeviceChoice, typer.Option("--device", help="cpu times NumPy through the same interface, to try it out.")
    ] = DeviceChoice.auto,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Also a second held-out set, which check --fresh scores.")
    ] = False,
    fresh_only: Annotated[bool, typer.Option("--fresh-only", help="Only the second held-out set.")] = False,
    quiet: opt.NoProgress = False,
) -> None:
    """Time what the folder does not hold yet, on the GPUs that this machine has.

    Rows are written one by one: after an interruption the same command goes on where it was.
    """
    from mofa.calibrate.run_cases import measure_cases
    from mofa.cli.parse import split_words
    from mofa.cli.progress import progress_bar
    from mofa.report.save import check_writable

    check_writable(out, directory=True)
    with progress_bar("calibrating", enabled=not quiet) as progress:
        counts = measure_cases(
            out,
            quick=quick,
            full=full,
            families=split_words(families) or None,
            device=device.value,
            progress=progress,
            fresh=fresh,
            fresh_only=fresh_only,
        )
    summary = f"{counts['measured']:,} measured, {counts['kept']:,} there before, {counts['unsupported']:,} unsupported"
    print(f"{out}: {summary}")


@calibrate.command("host")
def calibrate_host(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The host's profile, such as my-host.yaml.")],
    quiet: opt.NoProgress = False,
) -> None:
    """Time this machine's host in a minute, on one GPU of any kind, and write a profile for --host.

    Everything that a host takes to issue work is in it; what is not timed goes by a small op.
    """
    from mofa.calibrate.host_profile import host_profile_yaml, measure_host, refuse_without_gpu
    from mofa.cli.progress import progress_bar
    from mofa.report.save import check_writable, write_file_atomically

    check_writable(out)
    refuse_without_gpu()
    with progress_bar("timing the host", enabled=not quiet) as progress:
        facts = measure_host(progress)
    write_file_atomically(out, host_profile_yaml(facts).encode())
    print(f"wrote {out}: {facts['eager_op_s']['value']} a small op on {facts['cpu']}")
    print(f"use it: mofa plan llama3-8b h100-hgx --gpus 8 --host {out}")


@calibrate.command("fit")
def calibrate_fit(
    folders: Folders,
    name: Annotated[str, typer.Option("--name", help="Name of the profile.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Gets gpus/NAME.yaml and nodes/NAME.yaml.")],
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="NODE", help="Bundled node that gives what is not measured; else by the GPU."),
    ] = None,
) -> None:
    """Fit the curves of one kind of GPU and write the profile that plan uses.

    Several folders of the same GPU are joined: one GPU, two, four.
    """
    from tempfile import TemporaryDirectory

    from mofa.calibrate.fits.profile import fit_and_write_profiles
    from mofa.errors import SpecError
    from mofa.specs.write_files import all_files_or_none, check_writable, make_directory, write_file_atomically

    if not NAME.fullmatch(name):
        raise SpecError(f"--name: {name!r} is no name of a file; use letters, digits, '-', '_' and '.'")
    check_writable(out, directory=True)
    bases = None if base is None else _bases(base)
    with TemporaryDirectory() as scratch:  # whole files only, wherever it is interrupted
        written = fit_and_write_profiles(folders, name, Path(scratch), base=bases)
        paths = {kind: out / path.relative_to(scratch) for kind, path in written.items()}
        with all_files_or_none():
            for kind, path in paths.items():
                make_directory(path.parent)
                write_file_atomically(path, written[kind].read_bytes())
    for path in paths.values():
        print(f"wrote {path}")
    if "nodes" in paths:
        print(f"use it: mofa plan llama3-8b {paths['nodes']} --gpus 8")


@calibrate.command("nccl")
def calibrate_from_nccl_tests(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Outputs of nccl-tests programs, text or JSON.")
    ],
    profile: Annotated[
        str, typer.Option("--profile", metavar="NODE", help="A name in hardware_profiles/nodes, or a node's YAML.")
    ],
) -> None:
    """Put what nccl-tests measured into a node profile: what collectives reach of its links and its network.

    Ranks on one host measure the fast domain, and five sizes or more (-b 4K -e 1G -f 2) also give the curve of that
    collective. Ranks on several hosts measure the network: five sizes or more, of one file or several, give its latency
    beside the shares of its rate.
    """
    from mofa.calibrate.fits.nccl_import import import_nccl_tests_runs
    from mofa.report.imported_runs import print_node_profile_changes
    from mofa.report.tables import make_console

    print_node_profile_changes(import_nccl_tests_runs(files, profile), make_console())


@calibrate.command("check")
def calibrate_check(
    folders: Folders,
    by_op: Annotated[bool, typer.Option("--by-op", help="Also every op of a family by itself.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Score the second held-out set, that `run --fresh` measured.")
    ] = False,
    json: opt.Json = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write a figure per family, and every point as CSV.")
    ] = None,
    quiet: opt.NoProgress = False,
) -> None:
    """Compare predicted and measured times on shapes that the fit has not seen.

    Errors are fractions of the measured time; bias is the median with its sign. MoE layers in token chunks
    (`run --families chunked_moe`) are predicted with the bundled profile of their GPU, time and memory, and
    so are products with unaligned widths, time alone.
    """
    import sys

    from mofa.calibrate.cases import Split
    from mofa.calibrate.check import TARGETS, fit_errors_on_held_out_rows, rows_with_predicted_times
    from mofa.calibrate.chunked_check import predict_measured_layers, summarise_layer_errors
    from mofa.report.save import check_writable, save_calibration
    from mofa.validate.hosts import small_op_s_by_machine

    if out is not None:
        check_writable(out, directory=True)
    split: Split = "fresh" if fresh else "heldout"
    layers = predict_measured_layers(folders, split=split, hosts=small_op_s_by_machine())
    report = fit_errors_on_held_out_rows(folders, by_op=by_op, split=split, needed=not layers)
    if layers:
        report["chunked_moe"] = {name: {"layers": n, **errors} for name, n, errors in summarise_layer_errors(layers)}
    if out is not None:
        files = save_calibration(report, rows_with_predicted_times(folders), out)
        if not quiet:
            print(f"wrote {len(files)} files to {out}", file=sys.stderr)
    if json:
        from json import dumps

        sys.stdout.write(dumps(report, indent=2, allow_nan=False) + "\n")
        return
    if report["families"]:
        _print_check(report, TARGETS)
    if layers:
        from mofa.report.chunked_layers import print_chunked_layers
        from mofa.report.tables import make_console

        print_chunked_layers(layers, make_console())


def _bases(node: str) -> tuple[str, str]:
    """The GPU profile and the node profile of a bundled node."""
    from mofa.errors import SpecError
    from mofa.specs.files import bundled_names, did_you_mean
    from mofa.specs.load import load_cluster

    if node not in bundled_names("nodes"):
        raise SpecError(f"--base: {node!r} is no bundled node; {did_you_mean(node, bundled_names('nodes'))}")
    return str(load_cluster(node, 1).node.gpu), node


def _print_check(report: Mapping[str, Any], targets: Mapping[str, tuple[float, float]]) -> None:
    from mofa.report.tables import make_console, print_table

    numbers = [("points", "right"), ("median", "right"), ("90th percentile", "right"), ("bias", "right"),
               ("extrapolated", "right")]  # fmt: skip
    console = make_console()
    rows = []
    for name, family in report["families"].items():
        wanted = targets.get(name)
        met = "" if wanted is None else "yes" if _meets(family, wanted) else "no"
        rows.append([name, *_cells(family), "" if wanted is None else f"{wanted[0]:.0%}, {wanted[1]:.0%}", met])
    columns = [("family", "left"), *numbers, ("wanted: median, 90th", "right"), ("met", "left")]
    print_table(console, "Predicted against measured, held-out shapes", columns, rows)
    if "ops" in report:
        ops = [[name, *_cells(op)] for name, op in report["ops"].items()]
        print_table(console, "By op", [("op", "left"), *numbers], ops)


def _meets(family: Mapping[str, float], wanted: Sequence[float]) -> bool:
    return family["median_abs_error"] <= wanted[0] and family["p90_abs_error"] <= wanted[1]


def _cells(errors: Mapping[str, float]) -> list[str]:
    shares = (errors["median_abs_error"], errors["p90_abs_error"])
    return [str(errors["points"]), *(f"{x:.1%}" for x in shares), f"{errors['bias']:+.1%}", str(errors["extrapolated"])]
