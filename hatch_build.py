"""Compiles the parts in C where a compiler is at hand: for a wheel, an editable installation, or in place.

python hatch_build.py    # in place
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from hashlib import sha256
from pathlib import Path
from typing import Any

SOURCES = (
    Path("mofa/replay/allocator/native_segments.c"),
    Path("mofa/cost/step_time/native_longest_path.c"),
    Path("mofa/cost/block/native_clock.c"),
)


def compile_in(root: Path, of: Path, library: Path | None = None) -> Path | None:
    """The library made, beside its source by default; None where no compiler is or can: mofa does without."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    source = root / of
    library = library or source.with_suffix(".so")
    made = library.with_suffix(".new")
    hash_ = sha256(source.read_bytes()).hexdigest()
    options = [
        "-O3",
        "-ffp-contract=off",
        "-fPIC",
        "-shared",
    ]  # what is added and multiplied is rounded twice, as in Python
    command = [compiler, *options, f'-DSOURCE="{hash_}"', "-o", str(made), str(source)]
    if subprocess.run(command, check=False).returncode:
        made.unlink(missing_ok=True)
        return None
    made.replace(library)  # a process may have the old one open
    return library


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, where hatchling need not be
    pass
else:

    class CompiledPart(BuildHookInterface):  # type: ignore[type-arg]
        """Puts the libraries into a wheel, which is for one kind of machine then."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Compile before the files of a wheel are gathered."""
            made = [library for source in SOURCES if (library := compile_in(Path(self.root), source)) is not None]
            if not made or self.target_name != "wheel":
                return
            build_data["artifacts"] += [library.relative_to(self.root).as_posix() for library in made]
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


if __name__ == "__main__":
    made = [compile_in(Path(__file__).parent, source) for source in SOURCES]
    sys.exit(0 if all(made) else "no C compiler, or it failed: mofa runs without")
