"""Build a wheel and an sdist, install each into a fresh environment, and use it away from the repository.

    python scripts/installed_smoke.py [--python python3.12] [--keep DIR]

Commands run in an empty folder without the repository on any path. They show, plan, estimate, export and report, as a
user does first; the plan must be that of this checkout, to the last digit. ``mofa serve`` says what is missing without
the extra serve, and with it answers a page. What is missing from a package fails here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLAN = ("plan", "llama3-8b", "h100-hgx", "--gpus", "8", "--fast", "--json", "--quiet")
COMMANDS = (
    ("--version",),
    ("show", "models"),
    ("show", "hardware"),
    ("show", "faults"),
    ("schema",),
    ("estimate", "qwen3-30b-a3b", "h200-hgx", "--gpus", "8", "--strategy", "ep=8 micro_batch=1", "--quiet"),
    ("plan", "llama3-8b", "h100-hgx", "--gpus", "8", "--fast", "--quiet", "--json-file", "plan.json"),
    ("export", "plan.json", "--to", "megatron", "--out", "job"),
    ("goodput", "--mtbf", "6h", "--checkpoint", "5min", "--restart", "10min", "--quiet"),
    ("new", "node", "--like", "h100-hgx", "--out", "node.yaml"),
    ("report", "llama3-8b", "h100-hgx", "--gpus", "8", "--fix", "cp=1", "--refine-seconds", "0", "--out", "report"),
)
"""What is run, in order, in one empty folder."""
SERVE = ("serve", "llama3-8b", "h100-hgx", "--gpus", "8", "--no-browser", "--port", "0")
SERVED = {
    "": b"<!doctype html>",
    "serve.js": b"use strict",
    "charts.js": b"Plotly",
    "report.css": b"{",
    "first": b'"llama3-8b"',
}
"""Pages of a server, and what each has in it."""
PATIENCE_S = 60.0
"""For a page of a server that says where it is. [s]"""
LIBRARIES = 3
"""Parts in C that a wheel has where a compiler is at hand. [-]"""


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a command and return what it prints; its errors are shown, and end the script."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def plan_of(text: str) -> dict[str, Any]:
    """The JSON of a plan without the seconds that its search took."""
    report: dict[str, Any] = json.loads(text)
    report.pop("elapsed_s")
    return report


def build(python: Path, folder: Path, environment: dict[str, str]) -> tuple[Path, Path]:
    """The wheel and the sdist, built by the backend that pyproject.toml names; the wheel from the sdist."""
    run([str(python), "-m", "pip", "install", "-q", "hatchling"], ROOT, environment)
    run([str(python), "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)], ROOT, environment)
    (sdist,) = folder.glob("mofa-*.tar.gz")
    run([str(python), "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(sdist)], folder, environment)
    (wheel,) = folder.glob("mofa-*.whl")
    return wheel, sdist


def check_wheel(wheel: Path) -> None:
    """Refuse a wheel that lacks data, or has what belongs to the repository alone."""
    names = zipfile.ZipFile(wheel).namelist()
    for folder in ("hardware_profiles/nodes", "workloads", "framework_profiles", "fault_profiles"):
        if not any(name.startswith(f"mofa/_data/{folder}/") for name in names):
            raise SystemExit(f"{wheel.name}: has no {folder}")
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    if tops != {"mofa"}:
        raise SystemExit(f"{wheel.name}: has {', '.join(sorted(tops - {'mofa'}))} beside mofa")
    compiled = [name for name in names if name.endswith((".so", ".dylib", ".dll"))]
    print(f"{wheel.name}: {len(names):,} files, {wheel.stat().st_size / 1e6:.1f} MB, {len(compiled)} parts in C")
    if compiled and len(compiled) != LIBRARIES:
        raise SystemExit(f"{wheel.name}: has {len(compiled)} of {LIBRARIES} parts in C")


def smoke(python: Path, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Use what is installed, in an empty folder; returns its plan."""
    where = run([str(python), "-c", "import mofa; print(mofa.__file__)"], folder, environment).strip()
    if ROOT in Path(where).resolve().parents:
        raise SystemExit(f"mofa was imported from {where}, in the repository")
    program = str(python.with_name("mofa"))
    for command in COMMANDS:
        run([program, *command], folder, environment)
    if not (folder / "report" / "report.html").is_file() or not (folder / "job" / "megatron.sh").is_file():
        raise SystemExit("the report or the job was not written")
    return plan_of(run([program, *PLAN], folder, environment))


def check_serve_is_an_extra(program: str, folder: Path, environment: dict[str, str]) -> None:
    """Refuse a ``mofa serve`` that runs without its extra, or that ends otherwise than in a line that names it."""
    done = subprocess.run([program, *SERVE], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 2 or "mofa[serve]" not in done.stderr or "Traceback" in done.stderr:
        raise SystemExit(f"mofa serve without its extra: exit status {done.returncode}\n{done.stdout}{done.stderr}")


def check_serve(program: str, folder: Path, environment: dict[str, str]) -> None:
    """Start a server, get its pages, and stop it as Ctrl-C does."""
    server = subprocess.Popen([program, *SERVE], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        line = server.stderr.readline()
        place = re.search(r"http://\S+/", line)
        if place is None:
            raise SystemExit(f"mofa serve says {line + server.stderr.read()!r}")
        for name, content in SERVED.items():
            with urllib.request.urlopen(place[0] + name, timeout=PATIENCE_S) as response:
                if content not in response.read():
                    raise SystemExit(f"mofa serve: /{name} has no {content!r}")
        server.send_signal(signal.SIGINT)
        status = server.wait(PATIENCE_S)
        words = server.stderr.read()
        if status not in (0, 130) or "Traceback" in words:
            raise SystemExit(f"mofa serve: exit status {status} upon an interrupt\n{words}")
    finally:
        server.kill()


def main() -> int:
    """Build, install, use."""
    parser = argparse.ArgumentParser(description="A wheel and an sdist, installed and used away from the repository.")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    parser.add_argument("--keep", type=Path, help="folder for what is built, kept")
    options = parser.parse_args()
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    own = run([sys.executable, "-m", "mofa", *PLAN], ROOT, environment | {"PYTHONPATH": str(ROOT)})
    with tempfile.TemporaryDirectory(prefix="mofa-smoke-") as temporary:
        scratch = Path(temporary)
        run([options.python, "-m", "venv", str(scratch / "venv")], scratch, environment)
        python, built = scratch / "venv" / "bin" / "python", options.keep or scratch / "dist"
        built.mkdir(exist_ok=True)
        wheel, sdist = build(python, built, environment)
        check_wheel(wheel)
        program = str(python.with_name("mofa"))
        for file, how in ((wheel, []), (sdist, ["--force-reinstall", "--no-deps"])):
            run([str(python), "-m", "pip", "install", "-q", *how, str(file)], scratch, environment)
            folder = scratch / file.suffix.removeprefix(".")
            folder.mkdir()
            if smoke(python, folder, environment) != plan_of(own):
                raise SystemExit(f"{file.name}: plans otherwise than this checkout")
            if file == wheel:
                check_serve_is_an_extra(program, folder, environment)
                run([str(python), "-m", "pip", "install", "-q", f"{wheel}[serve]"], scratch, environment)
            check_serve(program, folder, environment)
            print(f"{file.name}: {len(COMMANDS) + 2} commands passed, with this checkout's plan")
    return 0


if __name__ == "__main__":
    sys.exit(main())
