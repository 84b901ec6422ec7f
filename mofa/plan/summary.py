"""Plans as people read them where they are printed: ``print(plan)``, ``repr(plan)``, and a strategy as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from mofa.schedules import default_schedule
from mofa.units import GIB, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mofa.plan.memory import Memory
    from mofa.specs.strategy import StrategySpec

USUAL_COLUMNS = (
    "tp", "sp", "pp", "vpp", "cp", "ep", "dp", "micro_batch", "zero", "recompute", "schedule", "step_s",
    "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "device_bytes", "capacity_bytes", "fits",
    "days_without_failures", "usd",
)  # fmt: skip
"""What a table of plans has where not all columns are asked for."""


_NAMES = {
    "gemm": "matrix products",
    "grouped_gemm": "grouped matrix products",
    "attention": "attention",
    "memory_bound": "memory-bound kernels",
    "recompute": "recomputation",
    "host_idle": "waiting for the host",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "pp": "pipeline communication",
    "dp": "data-parallel communication",
    "bubble": "pipeline bubble",
    "stragglers": "waiting for stragglers",
    "optimizer": "optimizer",
    "cuda_context": "CUDA context",
}


def component_words(name: str) -> str:
    """A component as words.

    Parameters
    ----------
    name
        Of seconds or bytes, as JSON has it.

    Returns
    -------
    str
        Its words.

    Examples
    --------
    >>> component_words("tp"), component_words("allocator_slack")
    ('tensor-parallel communication', 'allocator slack')
    """
    return _NAMES.get(name, name.replace("_", " "))


def strategy_text(strategy: StrategySpec, *, moe: bool = True) -> str:
    """A strategy as ``--strategy`` reads it: degrees of 1 left out, what frameworks differ in always said.

    Parameters
    ----------
    strategy
        The strategy.
    moe
        Whether the model has experts; a dense one has no etp to speak of.

    Returns
    -------
    str
        Degrees and switches, a blank between two.

    Examples
    --------
    >>> from mofa.specs.strategy import StrategySpec
    >>> strategy_text(StrategySpec(tp=4, sp=True, pp=2, dp=8, recompute="selective"), moe=False)
    'tp=4 sp=true pp=2 dp=8 micro_batch=1 zero=1 recompute=selective'
    """
    degrees = {"tp": strategy.tp, "pp": strategy.pp, "vpp": strategy.vpp, "cp": strategy.cp, "ep": strategy.ep}
    words = [f"{name}={degree}" for name, degree in degrees.items() if degree > 1]
    if strategy.tp > 1:
        words.insert(1, f"sp={str(strategy.sp).lower()}")
    if strategy.cp > 1:
        words.append(f"cp_kind={strategy.cp_kind}")
    if moe and (strategy.ep, strategy.etp, strategy.tp) != (1, 1, 1):
        words.append(f"etp={strategy.etp}")
    words += [f"dp={strategy.dp}", f"micro_batch={strategy.micro_batch}", f"zero={strategy.zero}"]
    words.append(f"recompute={strategy.recompute}")
    if strategy.schedule != default_schedule(strategy.vpp):
        words.append(f"schedule={strategy.schedule}")
    if strategy.token_chunks > 1:
        words.append(f"token_chunks={strategy.token_chunks}")
    if strategy.layout and " " not in strategy.layout:  # a list of module names stands in files alone
        words.append(f"layout={strategy.layout}")
    if strategy.balancing != "none":
        words.append(f"balancing={strategy.balancing}")
    words += [f"{name}={str(value).lower()}" for name, value in strategy.options.chosen_options.items()]
    return " ".join(words)


class PrintedPlanFields(Protocol):
    """What of a plan is printed; :class:`mofa.plan.result.Plan` has it."""

    @property
    def strategy(self) -> StrategySpec: ...

    @property
    def step_s(self) -> float: ...

    @property
    def tokens_per_s_per_gpu(self) -> float: ...

    @property
    def tflops_per_gpu(self) -> float: ...

    @property
    def mfu(self) -> float: ...

    @property
    def memory(self) -> Memory: ...

    @property
    def days_without_failures(self) -> float | None: ...

    @property
    def usd(self) -> float | None: ...

    @property
    def gpu_hours(self) -> float | None: ...


def plan_line(plan: PrintedPlanFields) -> str:
    """A plan in one line: its strategy, speed and memory.

    Parameters
    ----------
    plan
        An estimate, or a plan of a search.

    Returns
    -------
    str
        One line without an end.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> plan = mofa.estimate(job, machines, "tp=2 recompute=full", replay=False)
    >>> plan_line(plan).split(":")[0]
    'tp=2 sp=true etp=1 dp=4 micro_batch=1 zero=1 recompute=full'
    """
    memory = plan.memory
    fits = "" if memory.fits else ", does not fit"
    return (
        f"{strategy_text(plan.strategy)}: {format_seconds(plan.step_s)} a step, MFU {plan.mfu:.1%}, "
        f"{memory.device_bytes / GIB:.2f} of {memory.limit_bytes / GIB:.2f} GiB{fits}"
    )


def plan_text(plan: PrintedPlanFields, exposed: Mapping[Any, float]) -> str:
    """A plan in a few lines: what it is, how fast, what it takes, and where its step goes.

    Parameters
    ----------
    plan
        An estimate, or a plan of a search.
    exposed
        Seconds of the step by component, of which the four largest are shown. [s]

    Returns
    -------
    str
        A line each, without an end.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> plan = mofa.estimate(job, machines, "tp=2 recompute=full", replay=False)
    >>> print(plan_text(plan, plan.time.exposed).splitlines()[0])
    strategy  tp=2 sp=true dp=4 micro_batch=1 zero=1 recompute=full on megatron
    """
    memory = plan.memory
    over = "" if memory.fits else f" (does not fit, {-memory.free_bytes / GIB:.2f} GiB over)"
    parts = sorted(exposed.items(), key=lambda part: -part[1])[:4]
    speed = f"{plan.tokens_per_s_per_gpu:,.1f} tokens/s/GPU, {plan.tflops_per_gpu:.1f} TFLOP/s/GPU, MFU {plan.mfu:.1%}"
    has_experts = any(exposed.get(name, 0.0) > 0.0 for name in ("grouped_gemm", "ep"))
    lines = [
        f"strategy  {strategy_text(plan.strategy, moe=has_experts)} on {plan.strategy.framework}",
        f"step      {format_seconds(plan.step_s)}, {speed}",
        f"memory    {memory.device_bytes / GIB:.2f} GiB of {memory.limit_bytes / GIB:.2f} GiB{over}",
        "of step   "
        + ", ".join(f"{component_words(name)} {value / plan.step_s:.1%}" for name, value in parts if value),
    ]
    if plan.days_without_failures is not None:
        lines.append(f"run       {plan.days_without_failures:,.1f} days without failures")
    if plan.usd is not None:
        lines.append(f"price     {plan.usd:,.0f} USD, {plan.gpu_hours or 0:,.0f} GPU-hours")
    return "\n".join(lines)


def report_text(job_on_machines: str, plans: Sequence[PrintedPlanFields], min_gpus: int | None) -> str:
    """What a search found: a line for each plan, or how many GPUs would do.

    Parameters
    ----------
    job_on_machines
        What was planned, in words.
    plans
        What fits, best first.
    min_gpus
        GPUs that would do where nothing fits, if a number is known. [-]

    Returns
    -------
    str
        A line each, without an end.

    Examples
    --------
    >>> print(report_text("a job on 8 GPUs", [], 64))
    a job on 8 GPUs: 0 plans
    nothing fits; 64 GPUs would do
    """
    lines = [f"{job_on_machines}: {len(plans)} plans"]
    lines += [f"{number:2d}  {plan_line(plan)}" for number, plan in enumerate(plans, start=1)]
    if not plans:
        lines.append("nothing fits" + (f"; {min_gpus:,} GPUs would do" if min_gpus else ""))
    return "\n".join(lines)
