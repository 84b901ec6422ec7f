"""Replicas that go on without the one that failed, and take it back with their states: nobody rolls back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mofa.faults.checks import FloatN, check_at_least_zero
from mofa.faults.closed_forms.renewal import renewal_ettr
from mofa.faults.spares import ettr_of_continuing_replicas


@dataclass(frozen=True)
class ReplicaAbsence:
    """A replica's failure, of n candidates: for how long all stand still, and until it is back. (n,) [s]"""

    stall_s: FloatN
    return_s: FloatN
    step_s: FloatN
    num_replicas: FloatN

    @property
    def cost_per_failure_s(self) -> FloatN:
        """What a failure costs all replicas together, as if all stood still. (n,) [s]"""
        return np.asarray(self.stall_s + self.step_s / 2 + self.return_s / self.num_replicas)

    def all_down_mtbf_s(self, mtbf_s: FloatN) -> FloatN:
        """Mean time between the moments at which the last replica fails too; that of failures where there is one. [s]

        Each replica is down with ``q = T / (D M + T)``, independently, and all of them with ``q^D``, for ``T / D`` each
        time on average.
        """
        down, replicas = self.return_s, self.num_replicas
        with np.errstate(all="ignore"):
            log_all = replicas * (np.log(down) - np.log(replicas * mtbf_s + down))
            log_ratio = np.exp(np.minimum(np.log(down / replicas) - log_all, 700.0))
        return np.where(replicas > 1, np.where((down > 0) & np.isfinite(mtbf_s), log_ratio, np.inf), mtbf_s)

    def ledger_shares(
        self, interval_s: FloatN, block_s: FloatN, mtbf_s: FloatN, restart_s: FloatN, if_all_restart: dict[str, FloatN]
    ) -> dict[str, FloatN]:
        """Ledger where the others go on; ``if_all_restart``, that of a restart of all, where a plan has one replica.

        Shares of all replicas' time. While a replica is away its share counts as restarting, and a failure's half step
        and what all lose with the last of them as lost.
        """
        running = np.asarray(renewal_ettr(interval_s, block_s, self.all_down_mtbf_s(mtbf_s), restart_s))
        alone = ettr_of_continuing_replicas(
            mtbf_s, self.num_replicas, self.stall_s, self.return_s, self.step_s, if_all_restart["productive"]
        )
        productive = alone * running
        with np.errstate(invalid="ignore"):
            written = np.where(np.isinf(interval_s), 0.0, productive * block_s / interval_s)
            each = np.where(np.isinf(mtbf_s), 0.0, (self.stall_s + self.return_s / self.num_replicas) / mtbf_s)
        checkpoint = np.minimum(written, 1 - productive)
        restart = np.minimum(each * productive, 1 - productive - checkpoint)
        of_replicas = {
            "productive": productive, "checkpoint": checkpoint, "lost": 1 - productive - checkpoint - restart,
            "restart": restart, "waiting": np.zeros_like(productive),
        }  # fmt: skip
        return {
            name: np.where(self.num_replicas > 1, of_replicas[name], if_all_restart[name]) for name in if_all_restart
        }


def mean_missing_nodes(in_repair: ArrayLike, num_spares: ArrayLike) -> NDArray[np.float64]:
    """Nodes that are missing on average where the others go on: those in repair beyond the spares. [nodes]

    ``E[max(X - S, 0)]`` of a Poisson X, the nodes in repair (M/G/infinity).

    Parameters
    ----------
    in_repair
        Mean number of nodes in repair. [nodes]
    num_spares
        Nodes that stand by; at least 0. [nodes]

    Examples
    --------
    >>> float(mean_missing_nodes(2.0, 0)), round(float(mean_missing_nodes(2.0, 4)), 4)
    (2.0, 0.0751)
    """
    from scipy import stats  # half a second to load

    mean, spares = (
        check_at_least_zero("in_repair", in_repair, "nodes"),
        check_at_least_zero("num_spares", num_spares, "nodes"),
    )
    return np.asarray(mean * stats.poisson.sf(spares - 1, mean) - spares * stats.poisson.sf(spares, mean))
