"""``mofa new``: files to fill in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from mofa.cli.command_groups import UncutCommandList

new = typer.Typer(cls=UncutCommandList, help="Write files to fill in.", rich_markup_mode=None, add_completion=False)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names of GPUs: they become file names."""
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where to write it; not over a file.")]


@new.command("workload")
def new_workload(
    like: Annotated[
        str | None,
        typer.Option("--like", metavar="NAME", help="A bundled workload of the same kind (mofa show models)."),
    ] = None,
    from_config: Annotated[
        Path | None,
        typer.Option("--from-config", metavar="CONFIG.json", help="Fill in what mofa understands of this config.json."),
    ] = None,
    out: Out = None,
) -> None:
    """Write a workload's YAML to fill in: each field with its unit and where to find it.

    Numbers stand as ??? until they are written. Reading the file names all that are left.
    """
    from mofa.errors import SpecError
    from mofa.specs.files import bundled_names, did_you_mean
    from mofa.specs.huggingface.keys import model_of_config_class, read_keys
    from mofa.specs.huggingface.nearest import nearest_workload
    from mofa.specs.workload_template import bundled_workload_like, workload_template

    if like is None and from_config is None:
        raise SpecError("--like: is missing; name a bundled workload, such as --like qwen3-30b-a3b")
    if like is not None and like not in bundled_names("workloads"):
        raise SpecError(f"--like: {like} is no bundled workload; {did_you_mean(like, bundled_names('workloads'))}")
    _check_new(out)
    if from_config is None:
        text = workload_template(str(like))
    else:
        config, name = read_keys(from_config)
        model = model_of_config_class(from_config)
        nearest = nearest_workload(config) if model is None else bundled_workload_like(model)
        text = workload_template(like or nearest, config, name, model)
    _write(text, out, "mofa show workload {0} checks it and mofa plan takes it")


@new.command("gpu")
def new_gpu(
    like: Annotated[str, typer.Option("--like", metavar="NAME", help="A bundled GPU (mofa show hardware).")],
    out: Out = None,
) -> None:
    """Write a GPU's YAML to fill in: each fact with its unit and where to find it.

    Curves of kernels are those of the GPU that it is like, rescaled by peaks, bandwidths and power, and assumed.
    """
    from mofa.specs.hardware_template import gpu_template
    from mofa.specs.nearest_node import bundled_node_for_gpu

    _check_like(like, "gpus")
    _check_new(out)
    _write(
        gpu_template(like),
        out,
        f"mofa new node --like {bundled_node_for_gpu({'like': like})} --gpu {{0.stem}} makes a node of it",
    )


@new.command("node")
def new_node(
    like: Annotated[str, typer.Option("--like", metavar="NAME", help="A bundled node (mofa show hardware).")],
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="NAME", help="Its GPU: a bundled one, or a file beside it.")
    ] = None,
    out: Out = None,
) -> None:
    """Write a node's YAML to fill in: its links, bridges, switches and network, each with its unit."""
    from mofa.errors import SpecError
    from mofa.specs.files import bundled_names, hardware_suggestion, shown_value
    from mofa.specs.hardware_template import node_template
    from mofa.specs.profiles import find_gpu_file

    _check_like(like, "nodes")
    if gpu is not None and not NAME.fullmatch(gpu):
        raise SpecError(f"--gpu: {shown_value(gpu)} is no name of a GPU; give that of its file, without .yaml")
    if gpu is not None and find_gpu_file(gpu, out.absolute().parent if out else Path.cwd()) is None:
        raise SpecError(
            f"--gpu: {shown_value(gpu)} is no bundled GPU and no file beside the node's; "
            f"{hardware_suggestion(gpu, 'gpus')}"
            f"{'' if gpu in bundled_names('nodes') else ' (mofa new gpu writes a file of your own)'}"
        )
    _check_new(out)
    _write(node_template(like, gpu), out, "mofa show hardware {0} checks it and mofa plan takes it")


def _check_like(like: str, folder: Literal["gpus", "nodes"]) -> None:
    from mofa.errors import SpecError
    from mofa.specs.files import bundled_names, hardware_suggestion, shown_value

    if like not in bundled_names(folder):
        what = "GPU" if folder == "gpus" else "node"
        raise SpecError(f"--like: {shown_value(like)} is no bundled {what}; {hardware_suggestion(like, folder)}")


def _check_new(out: Path | None) -> None:
    """Refuse a place that cannot be written, or that holds a file."""
    from mofa.errors import SpecError
    from mofa.specs.write_files import check_writable

    if out is not None:
        check_writable(out)
        if out.exists():
            raise SpecError(f"{out}: exists; name another file, or remove it first")


def _write(text: str, out: Path | None, then: str) -> None:
    from mofa.specs.write_files import write_file_atomically

    if out is None:
        typer.echo(text, nl=False)
    else:
        write_file_atomically(out, text.encode())
        typer.echo(f"wrote {out}; write a value in place of each ???, then {then.format(out)}")
