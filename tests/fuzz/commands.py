"""Mutated command lines, each run by a child of this process as the command would be."""

from __future__ import annotations

import os
import random
import re
import select
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.fuzz.mutations import HOSTILE, extreme, mutated_lines
from tests.fuzz.number_paths import OF_FAULTS, drawn_setting
from tests.fuzz.readers import MEGATRON, PATHS, STRATEGY, TOML, kinds, written
from tests.fuzz.run import Findings

LONGEST_S = 60.0
"""Of a command. [s]"""
STATUSES = (0, 2, 3)
COMMANDS = (
    "estimate", "estimate", "estimate", "plan", "goodput", "scaling", "balance", "trace", "export", "show", "calibrate",
    "attribute", "chunks", "file", "file",
)  # fmt: skip
COSTED = ("estimate", "plan", "trace", "export")
LONG = ("estimate", "plan", "scaling")
"""Commands that take options of long runs; `scaling` is `goodput` of a job."""
LOG = "node,time,kind,until\n" + "".join(f"n{i % 3},2025-01-{i + 1:02d}T00:00:00,node,\n" for i in range(25))


def drawn_command(draw: random.Random, scratch: Path) -> list[str]:
    """One command line, with options and files that may be broken."""
    scratch.mkdir(parents=True, exist_ok=True)
    command = draw.choice(COMMANDS)
    workload = _mostly(draw, ["llama3-8b", "mixtral-8x7b"], ["nothing", ""])
    machines = [workload, _mostly(draw, ["h100-hgx", "h200-hgx"], ["nothing"]), "--gpus", _number(draw, "8")]
    strategy = mutated_lines(draw, STRATEGY) if draw.random() < 0.3 else draw.choice(["tp=2", "pp=2", "tp=4 pp=2"])
    if command == "file":
        return _of_file(draw, scratch)
    if command == "estimate":
        out = ["estimate", *machines, "--strategy", strategy, "--no-replay", "--quiet", "--global-batch",
               _number(draw, "16"), "--seq-len", _number(draw, "512")]  # fmt: skip
    elif command == "plan":
        out = ["plan", *machines, "--no-replay", "--quiet", "--seq-len", _number(draw, "512"), "--global-batch", "16",
               "--top", _number(draw, "3"), "--max", "tp=2 pp=2 vpp=1",
               "--refine-seconds", _number(draw, "0")]  # fmt: skip
    elif command == "goodput":
        out = ["goodput", "--mtbf", _time(draw), "--checkpoint", _time(draw), "--restart", _time(draw), "--runs",
               _number(draw, "10"), "--days", _number(draw, "5"), "--shape",
               draw.choice(["1", "0.5", "x", "0.2"]), "--seed", _number(draw, "3")]  # fmt: skip
        if draw.random() < 0.3:
            out += ["--checkpoint-interval", _time(draw)]
    elif command == "scaling":
        out = ["goodput", workload, "h100-hgx", "--gpus", draw.choice(["16", "16..64"]), "--faults", "llama3",
               "--quiet", "--global-batch", "64", "--seq-len", "512", "--strategy", "tp=2"]  # fmt: skip
    elif command == "balance":
        out = ["balance", "--experts", _number(draw, "16"), "--gpus", "8", "--ep", _number(draw, "4"), "--routing",
               draw.choice(["zipf:0.5", "balanced", "zipf:x", "dirichlet:1e-9", "lognormal:9e9", "zipf:nan"]),
               "--micro-batches", _number(draw, "4"), "--assignments", _number(draw, "4096"), "--quiet",
               "--capacity-factor", _number(draw, "1.2"), "--threshold", _number(draw, "1.5"), "--interval",
               _number(draw, "2"), "--seed", _number(draw, "1")]  # fmt: skip
    elif command == "trace":
        out = ["trace", *machines, "--strategy", strategy, "--out", str(scratch / "t.json"), "--global-batch", "16",
               "--seq-len", "512", "--jitter", _number(draw, "0.1"), "--micro-batches", _number(draw, "1"),
               "--seed", _number(draw, "2")]  # fmt: skip
    else:
        out = {
            "export": ["export", *machines, "--to", draw.choice(["megatron", "torchtitan", "x"]), "--strategy",
                       strategy, "--no-replay", "--global-batch", "16"],
            "show": ["show", *draw.choice([["models"], ["hardware", "h100-hgx"], ["hardware", "x"],
                                          ["faults", "llama3"], ["workload", workload],
                                          ["frameworks", "megatron"], ["x"], [""]])],
            "calibrate": ["calibrate", draw.choice(["check", "fit", "nccl"]), str(scratch / "none"), "--name", "x"],
            "attribute": ["attribute", str(scratch / "none.json"), "llama3-8b"],
            "chunks": ["chunks", workload, "h100-hgx", "--gpus", _number(draw, "8"), "--strategy", "ep=4",
                       "--window", _number(draw, "5"), "--headroom", _number(draw, "1.1")],
        }[command]  # fmt: skip
    for _ in range(draw.choice([0, 0, 1, 2]) if command in COSTED else 0):
        places = [str(scratch / "x.json"), "/", "", "x" * 300, "/proc/x", str(scratch)]
        out += draw.choice(
            [
                ["--set", f"{draw.choice(PATHS)}={_text(draw)}"],
                ["--set", "=".join(drawn_setting(draw))],
                ["--set", "=".join(drawn_setting(draw))],
                ["--memory-limit", f"{_number(draw, '40')} GB"],
                ["--jobs", _number(draw, "1")] if command != "trace" else [],
                ["--framework", _mostly(draw, ["megatron", "torchtitan"], ["x"])],
                ["--host-issue", f"{_number(draw, '6')} us"],
                ["--json-file", draw.choice(places)] if command in ("estimate", "plan") else [],
            ]
        )
    for _ in range(draw.choice([0, 1, 1, 2]) if command in LONG else 0):
        out += _long_run_option(draw, scratch)
    return [word.replace("\0", "?").encode(errors="replace").decode() for word in out]


def _long_run_option(draw: random.Random, scratch: Path) -> list[str]:
    """An option about long runs, with the profile that it needs."""
    path = draw.choice(list(OF_FAULTS))
    unit = OF_FAULTS[path].partition(" ")[2]
    (scratch / "log.csv").write_text(LOG)
    log = ["--log", str(scratch / "log.csv"), "--log-nodes", _number(draw, "64"), "--faults", "llama3"]
    return draw.choice(
        [
            ["--storage", _rate(draw)],
            ["--storage", f"{_rate(draw)}, {_rate(draw)}"],
            ["--price", extreme(draw)],
            [*log, "--log-days", extreme(draw)],
            log,
            ["--faults", draw.choice(["llama3", "rsc-1", "x"]), "--set", f"{path}={extreme(draw, unit)}"],
            ["--faults", "llama3", "--checkpoint-interval", extreme(draw, "s")],
            ["--faults", "llama3", "--spares", draw.choice([extreme(draw), "1 outside", "outside"])],
            ["--faults", "llama3", "--recovery", draw.choice(["replica", "checkpoint"]), "--storage", _rate(draw)],
            ["--faults", "llama3", "--checkpoint-mode", draw.choice(["async", "peer", "three-level"])],
            ["--tokens", extreme(draw)],
        ]
    )


def _rate(draw: random.Random) -> str:
    return extreme(draw, "B/s") if draw.random() < 0.5 else "2 TB/s"


def _of_file(draw: random.Random, scratch: Path) -> list[str]:
    """A command that reads a mutated file."""
    kind = draw.choice([kind for kind in kinds() if not kind.heavy])
    path = scratch / kind.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(written(draw, kind))
    on = ["h100-hgx", "--gpus", "8", "--strategy", "tp=2", "--no-replay", "--quiet"]
    first = kind.name.split()[0]
    commands = {
        "workload": ["estimate", str(path), *on],
        "hugging": ["estimate", str(path), *on, "--seq-len", "512", "--global-batch", "16"],
        "faults": ["goodput", "--faults", str(path), "--checkpoint", "60s", "--restart", "600s", "--gpus", "1K",
                   "--runs", "10", "--days", "1"],
        "run": ["estimate", str(path), "--no-replay", "--quiet"], "runs": ["estimate", str(path), "--no-replay"],
        "sweep": ["sweep", str(path), "--out", str(scratch / "sweep"), "--jobs", "1", "--quiet"],
        "events": ["goodput", "--log", str(path), "--log-nodes", "100"],
        "trace": ["attribute", str(path), "llama3-8b"], "kernels": ["attribute", str(path), "llama3-8b"],
        "nccl": ["calibrate", "nccl", str(path), "--profile", str(scratch / "n.yaml")],
        "counts": ["balance", "--experts", "4", "--ep", "2", "--trace", str(path), "--quiet"],
        "placement": ["balance", "--experts", "4", "--ep", "1", "--placement", str(path), "--quiet"],
        "megatron": ["estimate", str(path), "h100-hgx", "--from", "megatron", "--no-replay", "--quiet"],
        "torchtitan": ["estimate", str(path), "h100-hgx", "--gpus", "8", "--from", "torchtitan", "--no-replay"],
        "calibration": ["calibrate", "check", str(scratch)], "environment": ["calibrate", "check", str(scratch)],
    }  # fmt: skip
    return commands.get(first, ["show", "workload", str(path)])


def _mostly(draw: random.Random, sound: list[str], others: list[str]) -> str:
    return draw.choice(sound if draw.random() < 0.95 else others)


def _number(draw: random.Random, sound: str) -> str:
    return sound if draw.random() < 0.93 else draw.choice([extreme(draw), "3"])


def _time(draw: random.Random) -> str:
    odd = ["0s", "1e-9 s", "1e21 s", extreme(draw, "s"), extreme(draw, "d")]
    return _mostly(draw, ["5min", "1h", "1e15 d", "6h", "30 s"], odd)


def _text(draw: random.Random) -> str:
    try:
        return str(draw.choice(HOSTILE))[:400]
    except ValueError:
        return "9" * 400


def run_command(arguments: list[str], longest_s: float = LONGEST_S) -> tuple[int, str]:
    """Run the command in a child: its status, negative of a signal, and what it wrote to standard error."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            os.close(read)
            null = os.open(os.devnull, os.O_RDWR)
            for number, target in ((0, null), (1, null), (2, write)):
                os.dup2(target, number)
            from mofa.cli.main import main

            code = main(arguments)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        finally:
            with suppress(Exception):
                import sys

                sys.stderr.flush()
            os._exit(code)
    os.close(write)
    parts, until = [], time.monotonic() + longest_s
    while True:
        ready, _, _ = select.select([read], [], [], max(until - time.monotonic(), 0.0))
        if not ready:
            os.killpg(child, signal.SIGKILL)
            parts.append(f"took longer than {longest_s:g} s".encode())
            break
        data = os.read(read, 65536)
        if not data:
            break
        parts.append(data)
    os.close(read)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code, b"".join(parts).decode(errors="replace")


def judged(code: int, said: str) -> str:
    """What is wrong with how a command ended; nothing where it is right."""
    if code not in STATUSES:
        return f"status {code}"
    if "Traceback" in said or "internal error" in said or "Warning" in said:
        return "a traceback, an internal error or a warning"
    lines = [line for line in said.splitlines() if line.startswith("mofa:")]
    if code and len(lines) != 1:
        return f"{len(lines)} lines of error"
    return "control bytes" if re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", said.replace("\r", "")) else ""


def fuzz_commands(findings: Findings, draw: random.Random, scratch: Path, *, inputs: int, until: float) -> None:
    """Run so many commands, or until the clock says so."""
    import mofa.cli.main  # noqa: F401 - children need not load it

    for _ in range(inputs):
        if time.monotonic() > until:
            return
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            arguments = drawn_command(draw, Path(folder))
            before = {path.name for path in Path(folder).rglob("*")}
            code, said = run_command(arguments)
            findings.tried[f"command {arguments[0]}"] += 1
            findings.accepted[f"command {arguments[0]}"] += code == 0
            wrong = judged(code, said)
            if left := [path.name for path in Path(folder).rglob("*.tmp") if path.name not in before]:
                wrong = f"leaves {left[0]}"
            if wrong:
                place = re.sub(r"0x[0-9a-f]+|/\S+|\d{3,}", "", said)[-150:]
                files = b"".join(b"\n--\n" + p.read_bytes()[:3000] for p in Path(folder).rglob("*") if p.is_file())
                findings.add(f"command {arguments[0]}", f"{wrong}: {place!r}", repr(arguments).encode() + files)


__all__ = ["MEGATRON", "TOML", "drawn_command", "fuzz_commands", "judged", "run_command"]
