"""Points on a Dask cluster that runs already: ``mofa sweep --scheduler tcp://...``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mofa.errors import SpecError
from mofa.search.sweeps.code_digest import digest_of_code
from mofa.search.sweeps.plan_point import FAILED, Result, plan_point, result_without_plan
from mofa.search.sweeps.points import PointTask
from mofa.specs.files import shown_value

ANSWER_S, FIRST_WORKER_S = 10.0, 30.0
"""How long a scheduler may take to answer, and a first worker to be there. [s]"""
TASKS_AHEAD = 2
"""Tasks that a cluster has for each thread of its workers: one runs and one waits. [-]"""


def plan_on_dask(tasks: Sequence[PointTask], address: str) -> Iterator[tuple[str, Result]]:
    """Keys and results of tasks, in the order in which they end.

    Parameters
    ----------
    tasks
        The points.
    address
        Of the scheduler, such as ``tcp://10.0.0.1:8786``.

    Yields
    ------
    str, Result
        Each task once. The scheduler gives those of a worker that died to others; a point that several workers died of
        has failed.

    Raises
    ------
    SpecError
        If Dask is not installed here, the scheduler does not answer, has no worker, or workers have another mofa.
    """
    try:
        import distributed
    except ImportError:
        raise SpecError("--scheduler: needs Dask, which is not installed; pip install 'mofa[distributed]'") from None
    where = f"--scheduler {shown_value(address, 80)}"
    try:
        client = distributed.Client(address, timeout=ANSWER_S, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise SpecError(f"{where}: does not answer ({shown_value(why, 120)}); start one by: dask scheduler") from None
    with client:
        _refuse_other_workers(client, where)
        threads = sum(client.nthreads().values())
        waiting = iter(tasks)
        keys: dict[str, str] = {}

        def submit_next() -> Any:
            task = next(waiting, None)
            if task is None:
                return None
            future = client.submit(plan_point, task, key=f"mofa-{task.key}")
            keys[future.key] = task.key
            return future

        first = [future for _ in range(TASKS_AHEAD * max(threads, 1)) if (future := submit_next()) is not None]
        ended = distributed.as_completed(first, loop=client.loop)
        for future in ended:
            yield keys.pop(future.key), _result_of(future)
            future.release()
            if (more := submit_next()) is not None:
                ended.add(more)


def _refuse_other_workers(client: Any, where: str) -> None:
    """Refuse a cluster without workers, or whose workers do not have this mofa."""
    try:
        client.wait_for_workers(1, timeout=FIRST_WORKER_S)
    except TimeoutError:
        raise SpecError(
            f"{where}: has no worker; start some by: dask worker {where.split()[-1]} --nthreads 1"
        ) from None
    try:
        digests = client.run(digest_of_code)
    except Exception as error:
        why = shown_value(f"{type(error).__name__}: {error}", 120)
        raise SpecError(f"{where}: a worker has no such mofa ({why}); install the mofa of this machine there") from None
    for name, digest in digests.items():
        if digest != digest_of_code():
            raise SpecError(f"{where}: worker {name} has another mofa than this machine; install the same there")


def _result_of(future: Any) -> Result:
    """What a future came to; an error of the cluster is its point's, to be tried again by the next run."""
    try:
        result: Result = future.result()
    except Exception as error:
        return result_without_plan(FAILED, f"{type(error).__name__}: {error}", is_final=False)
    return result
