"""How fast mofa is on this machine: whole commands as a user has them, and on one core searches, short commands and
one estimate. Numbers for people, no asserts.

python benchmarks/search_speed.py           # what the project promises
python benchmarks/search_speed.py --smoke   # that it runs
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "POLARS_MAX_THREADS"), "1"
)
os.environ.update(ONE_THREAD)  # before NumPy is imported
ROOT = Path(__file__).resolve().parent.parent
MOFA = (sys.executable, "-m", "mofa.cli.main")
ESTIMATES = (
    ("llama3-70b", "h100-hgx", 64, "tp=4 pp=4 vpp=5 micro_batch=1 recompute=selective"),
    ("deepseek-v3", "h800-hgx", 2048, "tp=2 pp=16 ep=8 recompute=selective"),
    ("qwen3-30b-a3b", "h100-hgx", 64, "tp=2 pp=2 ep=8 recompute=selective"),
)
"""A dense model and two with experts."""


def machine() -> str:
    """CPU, cores of this process, operating system, and the versions that matter."""
    import numpy as np

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cpu}, {cores} cores; {platform.system()}; Python {platform.python_version()}, NumPy {np.__version__}"


def one_core() -> None:
    """Bind this process to one core, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def run(*command: str, cores: int = 1) -> tuple[float, float, int, str]:
    """Run a command on one core or on all (``cores`` 0).

    Its wall time and the processor time of all its processes [s], the peak resident memory of the largest [B], what it
    printed. Exit status 3 is fine.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed mofa is not compiled anew by each command: half a second
    bind = one_core if cores else None
    with tempfile.TemporaryFile() as out:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL, env=env, preexec_fn=bind)
        _, status, usage = os.wait4(process.pid, 0)
        took_s = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 3):
            raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}")
        out.seek(0)
        unit = 1 if sys.platform == "darwin" else 1024
        return took_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit, out.read().decode()


def search(workload: str, cluster: str, gpus: int, repeat: int, *options: str, cores: int = 1) -> None:
    """One `mofa plan`: of a few runs that which takes processors the least, from process start to process end."""
    command = ("plan", workload, cluster, "--gpus", str(gpus), *options)
    runs = [run(*MOFA, *command, "--json", cores=cores) for _ in range(repeat)]
    took_s, busy_s, peak_bytes, text = min(runs, key=lambda each: each[1])
    report, replay = json.loads(text), not {"--no-replay", "--fast"} & set(options)
    where = "one core" if cores else "all cores"
    print(
        f"mofa {' '.join(command)}, {where}: {took_s:.2f} s by the clock, elapsed_s {report['elapsed_s']:.2f}, "
        f"{busy_s:.2f} s of processors; {report['space']:,} strategies, {report['searched']:,} fully costed"
        + ("" if replay else f", {report['searched'] / report['elapsed_s']:,.0f} costed/s")
        + f"; largest process {peak_bytes / 2**20:,.0f} MiB",
        flush=True,
    )


def bounding(workload: str, cluster: str, gpus: int) -> None:
    """A search in this process that costs the rows that may be among the best, beside one that costs every row."""
    import mofa

    job, machines = mofa.load_workload(workload), mofa.load_cluster(cluster, gpus)

    def busy_s(every_row: bool) -> tuple[float, mofa.Search]:
        begun = time.process_time()
        search = mofa.find_plans(job, machines, replay=False, every_row=every_row)
        return time.process_time() - begun, search

    for _ in range(2):  # what both load is loaded by the second one
        (bounded_s, bounded), (every_s, every) = busy_s(False), busy_s(True)
    legal = sum(bounded.report.rejected.get(name, 0) for name in ("needless", "memory", "slower"))
    legal += bounded.report.feasible
    print(
        f"{workload} on {gpus:,} GPUs, closed forms, one process: {bounded_s:.2f} s of processor with bounds, "
        f"{every_s:.2f} s with every row costed; {bounded.report.searched:,} and {every.report.searched:,} of "
        f"{legal:,} legal rows costed",
        flush=True,
    )


def costing(workload: str, cluster: str, gpus: int) -> None:
    """Strategies per second of the cost model alone: legal rows of the default space, time and memory."""
    import numpy as np

    import mofa
    from mofa.cost.estimate import estimate_table
    from mofa.search.job_setup import routing_loads_by_ep
    from mofa.search.legality.masks import JobAndMachines, check_strategies
    from mofa.search.space import SOLVED, combinations_table, default_space, with_first_option_set

    job, machines = mofa.load_workload(workload), mofa.load_cluster(cluster, gpus)
    framework = mofa.load_framework(job.framework or "megatron")
    table = combinations_table(with_first_option_set(default_space(job, machines, framework)), machines, framework)
    legal = (check_strategies(JobAndMachines(job, machines, framework), table).reason < 0) & (
        table.recompute_layers != SOLVED
    )
    table = table.select_rows(np.flatnonzero(legal))
    loads = routing_loads_by_ep(job, table)
    started = time.perf_counter()
    estimate_table(job, machines, framework, table, loads)
    took_s = time.perf_counter() - started
    print(f"cost model alone: {len(table):,} strategies in {took_s:.2f} s, {len(table) / took_s:,.0f} strategies/s")


def one_estimate(workload: str, cluster: str, gpus: int, strategy: str, repeat: int) -> None:
    """`mofa.estimate` in closed form: the first call, and those once everything is loaded, of layers that no estimate
    had before and of layers that one had."""
    import mofa
    from mofa.blocks.tapes import cached_context_tapes

    job, machines = mofa.load_workload(workload), mofa.load_cluster(cluster, gpus)
    framework = mofa.load_framework("megatron")

    def timed(forget: bool) -> float:
        if forget:
            cached_context_tapes.cache_clear()
        started = time.perf_counter()
        mofa.estimate(job, machines, strategy, framework=framework, replay=False)
        return time.perf_counter() - started

    first = timed(forget=True)
    new, known = ([1e3 * timed(forget) for _ in range(repeat)] for forget in (True, False))
    print(
        f"mofa.estimate {workload} {cluster} {gpus} GPUs, {strategy!r}: median {statistics.median(new):.1f} ms, "
        f"{min(new):.1f} to {max(new):.1f} in {repeat}; of layers known from an estimate before "
        f"{statistics.median(known):.1f} ms, {min(known):.1f} to {max(known):.1f}; the first call {1e3 * first:.0f} ms"
    )


def short_command(repeat: int, *arguments: str) -> None:
    """A command of less than a second from process start to process end."""
    runs = [run(*MOFA, *arguments) for _ in range(repeat)]
    took_s, busy_s = statistics.median(each[0] for each in runs), statistics.median(each[1] for each in runs)
    print(f"mofa {' '.join(arguments)}: median {took_s:.2f} s by the clock, {busy_s:.2f} s of processors, of {repeat}")


def main() -> None:
    """Print one line per number."""
    parser = argparse.ArgumentParser(description="Speed of mofa on one core of this machine.")
    parser.add_argument("--smoke", action="store_true", help="small searches, once: only that it runs")
    smoke = parser.parse_args().smoke
    print(f"machine: {machine()}; one BLAS thread", flush=True)
    for arguments in (("--help",), ("estimate", "llama3-8b", "h100-hgx", "--gpus", "8", "--strategy", "tp=2")):
        short_command(1 if smoke else 7, *arguments)
    if smoke:
        search("llama3-8b", "h100-hgx", 8, 1, "--refine-seconds", "0")
        one_core()
        bounding("llama3-8b", "h100-hgx", 8)
        costing("llama3-8b", "h100-hgx", 8)
    else:
        search("llama3-8b", "h100-hgx", 64, 2, "--top", "3", cores=0)  # README's first plan
        for gpus in (8, 64):
            search("llama3-8b", "h100-hgx", gpus, 2, "--refine-seconds", "0")
        for gpus in (2048, 16384):
            search("deepseek-v3", "h800-hgx", gpus, 2, cores=0)
            for options in (("--refine-seconds", "0"), ("--fast",)):
                search("deepseek-v3", "h800-hgx", gpus, 2, *options)
        one_core()
        for gpus in (2048, 16384):
            bounding("deepseek-v3", "h800-hgx", gpus)
        costing("deepseek-v3", "h800-hgx", 2048)
    for workload, cluster, gpus, strategy in ESTIMATES[::2] if smoke else ESTIMATES:
        one_estimate(workload, cluster, gpus, strategy, 1 if smoke else 100)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"peak memory of this process: {peak / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
