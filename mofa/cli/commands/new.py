"""``mofa new``: files to fill in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

new = typer.Typer(help="Write files to fill in.", rich_markup_mode=None)


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
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to write it; not over a file.")
    ] = None,
) -> None:
    """Write a workload's YAML to fill in: each field with its unit and where to find it.

    Numbers stand as ??? until they are written. Reading the file names all that are left.
    """
    from mofa.errors import SpecError
    from mofa.specs.bounded import exists
    from mofa.specs.files import bundled, did_you_mean
    from mofa.specs.huggingface.keys import read_keys
    from mofa.specs.huggingface.nearest import nearest_workload
    from mofa.specs.workload_template import workload_template
    from mofa.specs.write_files import check_writable, write_atomic

    if like is None and from_config is None:
        raise SpecError("--like: is missing; name a bundled workload, such as --like qwen3-30b-a3b")
    if like is not None and like not in bundled("workloads"):
        raise SpecError(f"--like: {like} is no bundled workload; {did_you_mean(like, bundled('workloads'))}")
    if out is not None:
        check_writable(out)
        if exists(out):
            raise SpecError(f"{out}: exists; name another file, or remove it first")
    if from_config is None:
        text = workload_template(str(like))
    else:
        config, name = read_keys(from_config)
        text = workload_template(like or nearest_workload(config), config, name)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_atomic(out, text.encode())
        typer.echo(f"wrote {out}; write a value in place of each ???")
