"""How long mofa serve takes to answer at once: three jobs on 256 and 2,048 GPUs, each slider moved by a place.

python benchmarks/serve_speed.py [--smoke]

The first answer finds the degrees to hold, by a coarse search. The best of all strategies, which a page asks for behind
it, says by how much its step is longer. Then each slider moves a place up and down, from the best plan; the slowest
answer counts, with the sections and charts of the page. Processor seconds are those of one core.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, NamedTuple

import mofa
from mofa.plan.result import Plan
from mofa.serve.answer import ANCHORED, answer_at_once, degrees_and_anchors_of_plan, import_ahead
from mofa.serve.question import Anchor, Question, SliderDegrees
from mofa.serve.served_job import ServedJob

JOBS = (("llama3-8b", "h100-hgx"), ("llama3-70b", "h100-hgx"), ("deepseek-v3", "h800-hgx"))
SIZES = (256, 2048)


class Timed(NamedTuple):
    """An answer, and what it took."""

    answer: dict[str, Any]
    wall_s: float
    cpu_s: float


def timed(job: ServedJob, question: Question) -> Timed:
    """An answer as the server sends it."""
    wall, cpu = time.perf_counter(), time.process_time()
    answer = answer_at_once(job, question)
    json.dumps(answer, allow_nan=False)
    return Timed(answer, time.perf_counter() - wall, time.process_time() - cpu)


def held_degrees(plan: Plan) -> dict[str, Any]:
    """What an answer at once holds of a plan's degrees."""
    degrees = degrees_and_anchors_of_plan(plan)
    return {name: degrees[name] for name in ANCHORED}


def moves(job: ServedJob, gpus: int, first: dict[str, Any]) -> list[Question]:
    """Questions after the first: every slider a place up or down, twice and half the GPUs, and less memory."""
    anchor = {name: first["degrees"][name] for name in ANCHORED}
    capacity_gb = job.cluster.gpu.capacity_bytes.value / 1e9
    asked = [Question(gpus=number, anchor=Anchor(**anchor)) for number in (gpus, gpus // 2, 2 * gpus)]
    asked.append(Question(gpus=gpus, memory_gb=float(int(0.9 * capacity_gb)), anchor=Anchor(**anchor)))
    for name, values in first["choices"].items():
        now = values.index(first["degrees"][name]) if first["degrees"][name] in values else 0
        for place in (now - 1, now + 1):
            if 0 <= place < len(values):
                others = {key: value for key, value in anchor.items() if key != name}
                asked.append(
                    Question(gpus=gpus, degrees=SliderDegrees(**{name: values[place]}), anchor=Anchor(**others))
                )
    return asked


def main() -> None:
    """Time them and print a table."""
    parser = argparse.ArgumentParser(description="Seconds of the answers at once of mofa serve.")
    parser.add_argument("--smoke", action="store_true", help="one small job, to see that it runs")
    smoke = parser.parse_args().smoke
    import_ahead()  # as a server does before it says where it is
    print("job            GPUs  first, wall    CPU  longer  all, CPU  answers  slowest, wall    CPU  mean CPU")
    for name, node in JOBS[:1] if smoke else JOBS:
        for gpus in (8,) if smoke else SIZES:
            job = ServedJob(mofa.load_workload(name), mofa.load_cluster(node, gpus), mofa.load_framework("megatron"))
            first = timed(job, Question(gpus=gpus))
            started = time.process_time()
            best = mofa.find_plans(
                job.workload, job.cluster, framework=job.framework, top=1, replay=False, banded=False
            ).report.plans[0]
            all_s = time.process_time() - started
            longer = first.answer["result"]["plans"][0]["step_s"] / best.step_s - 1.0
            best_answer = answer_at_once(job, Question(gpus=gpus, anchor=Anchor(**held_degrees(best))))
            answers = [timed(job, question) for question in moves(job, gpus, best_answer)]
            wall_s, cpu_s = max(each.wall_s for each in answers), max(each.cpu_s for each in answers)
            mean_s = sum(each.cpu_s for each in answers) / len(answers)
            print(
                f"{name:12} {gpus:6,} {first.wall_s:12.2f} {first.cpu_s:6.2f} {100 * longer:6.1f}% {all_s:9.2f} "
                f"{len(answers):8} {wall_s:14.2f} {cpu_s:6.2f} {mean_s:9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
