"""What nccl-tests printed, text or JSON: which collective, on how many GPUs and hosts, and its times."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mofa.cost.kernels.fitted_forms import bus_bytes_per_payload_byte
from mofa.errors import SpecError
from mofa.specs.files import shown_value
from mofa.specs.limited_reads import number_of_json, parse_json, read_bytes, utf8_text
from mofa.specs.ranges import MAX_GPUS

NAMES = {"all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
         "alltoall": "all_to_all", "all_to_all": "all_to_all", "sendrecv": "send_recv"}  # fmt: skip
MAX_FILE_BYTES = 2**24
LEAST_S, MOST_S = 1e-12, 1e6
"""Of a collective. [s]"""
MAX_PAYLOAD_BYTES = 2**50


@dataclass(frozen=True)
class NcclTestsRun:
    """One run of nccl-tests: out-of-place times per payload."""

    op: str
    group: int
    hosts: int
    gpu: str | None
    points: tuple[tuple[int, float], ...]
    """Payload and time. [B, s]"""
    nccl: tuple[int, int] | None = None
    """Major and minor version of NCCL; None where the output does not name it."""

    @property
    def bus_bytes_per_s(self) -> float:
        """Bus bandwidth of the largest payload. [B/s]"""
        size, time_s = max(self.points)
        return size * bus_bytes_per_payload_byte(self.op, self.group) / time_s


def read_nccl_tests_output(file: Path) -> NcclTestsRun:
    """Read the output of one nccl-tests program."""
    where = shown_value(str(file), 200)
    text = utf8_text(read_bytes(file, where, MAX_FILE_BYTES, "this is no output of nccl-tests"), where)
    run = _from_json(file, text) if text.lstrip().startswith("{") else _from_text(file, text)
    if not run.points:
        raise SpecError(
            f"{file}: no rows of size and time; give the output of all_reduce_perf or another nccl-tests program"
        )
    if run.group < 2:
        raise SpecError(f"{file}: {run.group} rank(s); a collective needs two or more, and the header that lists them")
    return run


def _op_of(file: Path, text: str) -> str:
    programs = re.findall(r"(\w+?)_perf", text)
    for source in (*programs, file.stem.lower()):
        for name, op in NAMES.items():
            if name in source:
                return op
    if programs:
        known = ", ".join(f"{name}_perf" for name in NAMES if name != "all_to_all")
        raise SpecError(f"{file}: {programs[0]}_perf is of no collective that a plan has; give one of {known}")
    raise SpecError(f"{file}: which collective? rename the file to, for example, all_reduce_perf.txt")


def _from_text(file: Path, text: str) -> NcclTestsRun:
    ranks = re.findall(r"#\s+Rank\s+\d+(?:\s+Group\s+(\d+))?.*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)", text)
    column, points = _time_column(text), []
    for number, line in enumerate(text.splitlines(), start=1):
        cells = line.split()
        if len(cells) < 2 or not (cells[0].isascii() and cells[0].isdigit()):
            continue
        if len(cells) < column + 3:
            raise SpecError(f"{file}: line {number}: truncated after {len(cells)} columns; run nccl-tests again")
        try:
            size, time_s = int(cells[0]), float(cells[column]) / 1e6
        except ValueError:
            raise SpecError(f"{file}: line {number}: no time in column {column + 1}; is the output complete?") from None
        if not LEAST_S <= time_s <= MOST_S:
            raise SpecError(f"{file}: line {number}: time {cells[column]} us is no positive number")
        if size > MAX_PAYLOAD_BYTES:
            raise SpecError(f"{file}: line {number}: size {shown_value(cells[0])} B is more than any GPU holds")
        if size > 0:
            points.append((size, time_s))
    if points and "# Avg bus bandwidth" not in text:
        raise SpecError(f"{file}: truncated, its last line '# Avg bus bandwidth' is missing; run nccl-tests again")
    if match := re.search(r"# Out of bounds values\s*:\s*(\d+) FAILED", text):
        raise _wrong(file, int(match[1]))
    together = [rank for rank in ranks if rank[0] == ranks[0][0]]  # NCCL_TESTS_SPLIT runs several groups side by side
    gpu = ranks[0][2].strip() if ranks else None
    hosts = len({r[1] for r in together}) or 1
    return NcclTestsRun(_op_of(file, text), len(together), hosts, gpu, tuple(points), _version(text))


def _version(text: str) -> tuple[int, int] | None:
    """NCCL's version as the head of the output or NCCL's own log has it.

    Examples
    --------
    >>> _version("# nccl-tests version 2.17.6 nccl-headers=22809 nccl-library=22809")
    (2, 28)
    >>> _version("NCCL version 2.23.4+cuda12.4")
    (2, 23)
    """
    if number := re.search(r"nccl-library=(\d{4,6})\b", text):
        return nccl_version_from_number(int(number[1]))
    said = re.search(r"NCCL version (\d{1,3})\.(\d{1,3})", text)
    return (int(said[1]), int(said[2])) if said else None


def nccl_version_from_number(number: int) -> tuple[int, int]:
    """Major and minor of NCCL's number: 2 and 28 of 22809, 2 and 8 of 2804.

    Examples
    --------
    >>> nccl_version_from_number(22809), nccl_version_from_number(2804)
    ((2, 28), (2, 8))
    """
    return (number // 10_000, number // 100 % 100) if number >= 10_000 else (number // 1000, number // 100 % 10)


def _time_column(text: str) -> int:
    """Where the out-of-place time stands: its header names it, of programs without a root it comes earlier.

    Examples
    --------
    >>> _time_column("#       size         count      type   redop    root     time   algbw   busbw #wrong     time")
    5
    """
    header = re.search(r"^#\s+size(.*?)\b(?:cpu)?time\b", text, re.MULTILINE)
    return 1 + len(header[1].split()) if header else 5


def _what_it_lacks(error: Exception) -> str:
    """What a document is not, by what reading it raised.

    >>> _what_it_lacks(KeyError("config")), _what_it_lacks(TypeError("'int' object is not subscriptable"))
    ('config is missing', 'a field holds another kind of value than nccl-tests writes')
    """
    if isinstance(error, KeyError):
        return f"{shown_value(str(error.args[0]))} is missing"
    return "a field holds another kind of value than nccl-tests writes"


def _wrong(file: Path, values: int) -> SpecError:
    return SpecError(f"{file}: {values} wrong values: the collective did not work; its times say nothing")


def _from_json(file: Path, text: str) -> NcclTestsRun:
    """What ``--json`` writes since nccl-tests 2.17: devices hold the first rank of each process.

    Every process has ``nthreads * ngpus`` ranks.
    """
    document = parse_json(text, shown_value(str(file), 200), "give the JSON of an nccl-tests program")
    try:
        config, rows = document["config"], [r for r in document["results"] if r["out_of_place"] is not None]
        points = [
            (
                int(number_of_json(r["size"])),
                number_of_json(r["out_of_place"].get("time", r["out_of_place"].get("cpu_time"))) / 1e6,
            )
            for r in rows
        ]
        devices = config["devices"]
        group = len(devices) * int(number_of_json(config["nthreads"]) * number_of_json(config["ngpus"]))
        hosts = len({d["hostname"] for d in devices})
        gpu = str(devices[0]["device_info"]).strip()
        op = _op_of(file, str(document["args"][0]))
        wrong = int(number_of_json(document.get("out_of_bounds", {}).get("count", 0)))
        number = document.get("nccl_version")
        nccl = nccl_version_from_number(int(number)) if number is not None else None
    except SpecError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise SpecError(f"{file}: not the JSON of nccl-tests ({_what_it_lacks(error)}); run it with --json") from None
    if any(not LEAST_S <= t <= MOST_S for _, t in points):
        raise SpecError(f"{file}: a time is no positive number; is the output complete?")
    if any(not 0 <= size <= MAX_PAYLOAD_BYTES for size, _ in points):
        raise SpecError(f"{file}: a size is no number of bytes that a GPU holds; is the output complete?")
    if not 0 <= group <= MAX_GPUS:
        raise SpecError(f"{file}: {shown_value(str(group))} ranks are more than a cluster has; is the output complete?")
    if wrong:
        raise _wrong(file, wrong)
    return NcclTestsRun(op, group, hosts, gpu, tuple(p for p in points if p[0] > 0), nccl)
