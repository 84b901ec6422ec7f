"""Run the tests with the lowest versions of the dependencies that pyproject.toml allows.

    python scripts/lowest_versions.py [--python python3.11] [--keep DIR] [pytest arguments]

Direct dependencies, those of extras that have tests, and the test runner are pinned to their lower bounds; what they
need in turn is as new as they allow. The virtual environment lives in a temporary folder unless --keep names one.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST_RUNNER = ("pytest", "pytest-xdist", "hypothesis")

EXTRAS = ("distributed", "serve")
"""Extras whose packages are there, so that no test is left out for want of them."""


def lowest(requirements: list[str]) -> list[str]:
    """The lower bound of each requirement as a pin.

    >>> lowest(["numpy>=1.26", "rich>=13.6,<16"])
    ['numpy==1.26', 'rich==13.6']
    """
    pins = []
    for requirement in requirements:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*>=\s*([0-9.]+)[^;]*(?:;.*)?", requirement)
        if match is None:
            raise SystemExit(f"pyproject.toml: {requirement!r} has no lower bound; write NAME>=VERSION")
        pins.append(f"{match[1]}=={match[2]}")
    return pins


def main() -> int:
    """Make the environment, run the tests in it."""
    parser = argparse.ArgumentParser(description="Tests with the lowest versions of the dependencies.")
    parser.add_argument("--python", default="python3.11", help="interpreter; the lowest that the project supports")
    parser.add_argument("--keep", type=Path, help="folder of the virtual environment, kept; reused if it is there")
    options, pytest_arguments = parser.parse_known_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dev = [r for r in project["optional-dependencies"]["dev"] if re.match(r"[A-Za-z0-9-]+", r)[0] in TEST_RUNNER]  # type: ignore[index]
    extras = [requirement for name in EXTRAS for requirement in project["optional-dependencies"][name]]
    pins = lowest(project["dependencies"]) + lowest(extras) + lowest(dev)
    print("\n".join(pins), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary) / "venv"
        python = folder / "bin" / "python"
        if not python.exists():
            subprocess.run([options.python, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *pins], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", "-e", str(ROOT)], check=True)
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | threads
        command = [str(python), "-m", "pytest", "-q", "-n", "auto", *pytest_arguments]
        return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
