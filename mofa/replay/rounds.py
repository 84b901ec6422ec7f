"""Which rounds of a pipeline's steady state need not be played, as they would change nothing."""

from __future__ import annotations

TURNS = 1
"""How often all that is in flight is replaced before a state without change of its peaks counts as steady. [-]"""


class Rounds:
    """Finds rounds of a steady state that can be left out: the first state that comes back, after one round or several.

    Blocks change places among the micro-batches in flight, and small differences in what free blocks are left wander
    with them, so that a state may come back late or never. Rounds are left out, too, once peaks and what is in flight
    have not changed while all that is in flight came and went :data:`TURNS` times.
    """

    def __init__(self, acts: tuple[tuple[str, int, int], ...], sizes: tuple[int, ...]) -> None:
        self.acts, self.sizes = acts, sizes
        self.size = self.start = 0
        self.states: dict[object, int] = {}
        self.flying: tuple[object, ...] = ()
        self.peaks: list[tuple[object, ...]] = []

    def end(self, n: int) -> bool:
        """Whether a round ends in front of computation ``n`` and another like it follows."""
        if self.size and (n - self.start) % self.size:
            return False
        size = next((size for size in self.sizes if self._like(n, size)), 0)
        if size != self.size:
            self.size, self.start, self.states, self.peaks = size, n, {}, []
        return size > 0

    def same(self, flying: tuple[object, ...]) -> bool:
        """Whether as much is in flight as a round ago: else nothing can have come back."""
        before, self.flying = self.flying, flying
        return before == flying

    def _like(self, n: int, size: int) -> int:
        """By how many micro-batches the ``size`` computations from ``n`` follow those before them; 0 where other."""
        acts = self.acts
        if n < size or n + size > len(acts):
            return 0
        shift = acts[n][2] - acts[n - size][2]
        for (kind, c, i), (other, k, j) in zip(acts[n : n + size], acts[n - size : n], strict=True):
            if kind != other or c != k or i - j != shift:
                return 0
        return max(shift, 0)

    def skip(self, n: int, state: object, peaks: tuple[object, ...]) -> tuple[int, int]:
        """How many computations can be left out here, and how many of those before them they repeat."""
        self.peaks.append(peaks)
        since = self.states.get(state)
        self.states[state] = n
        begun = sum(kind == "F" for kind, _, _ in self.acts[n : n + self.size])
        patience = max(1, -(-TURNS * len(self.flying) // max(begun, 1)))
        recent = self.peaks[-1 - patience :]
        settled = len(recent) > patience and all(p == peaks for p in recent)
        period = n - since if since is not None else self.size if settled else 0
        if not period:
            return 0, 0
        like = 0  # rounds that follow and are like this one
        while self._like(n + like * self.size, self.size):
            like += 1
        return like * self.size // period * period, period
