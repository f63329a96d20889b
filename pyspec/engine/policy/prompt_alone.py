"""Whether a prompt runs alone, as a CUDA graph, while other requests rest for a round. Arithmetic only: no torch, and no clock of its own.

A forward with prompts and decoding slots is no graph. The host launches its kernels one by one, which takes it longer than the device needs
if the model is small or divided over several GPUs: 62 ms for a forward of a 27B model on four H100, where the graph of a prompt of 300 tokens
takes about 20. One such forward for all requests is then slower than a graph for each prompt and a round of the decoding slots behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyspec.engine.policy.forward_costs import ForwardCosts

PAUSE_MS = 400.0  # most that others wait for such rounds, one after the other
DOUBT_EVERY = 50  # such choices, one forward for all is measured anew
BETTER = 0.95  # of the time of one forward for all; above it nothing is gained that noise does not take

GraphOf = Callable[[int], int | None]


class PromptsAlone:
    """Chooses rounds of one prompt.

    graph_of  rows of the graph that holds a whole prompt of so many tokens; None: there is none
    costs     of forwards with prompts that are no graphs
    rested    milliseconds that others have waited for such rounds, since the last round for all
    """

    def __init__(self, costs: ForwardCosts) -> None:
        self.graph_of: GraphOf = lambda n_row: None
        self.costs = costs
        self.rested = 0.0
        self.graphs = ForwardCosts()  # of prompts' graphs
        self._n_picked = 0

    def landed(self, rows: int, ms: float, *, others: bool) -> None:
        """The graph of a prompt, of so many rows, took so long. others: requests waited for it."""
        self.graphs.add(rows, ms)
        self.rested += ms if others else 0.0

    def pick(
        self,
        whole: Sequence[int],
        n_other: int,
        n_verify: int,
        verify_ms: float,
        most: int,
        pause_ms: float = PAUSE_MS,
    ) -> int | None:
        """The prompt that runs alone in this round; None: all requests run together.

        whole: tokens of each prompt that waits from its first token on, oldest first, 0 if it can not be a graph; n_other: rows of the other
        prompts; n_verify: rows of the decoding slots, in `verify_ms` milliseconds by themselves; most: rows of one forward for all; pause_ms:
        most that others wait for rounds of this kind, one after the other.
        """
        graphs = [(i, rows) for i, n in enumerate(whole) if (rows := self.graph_of(n))]
        if not graphs or not self.costs.is_known:
            return None
        n_together = sum(whole) + n_other + n_verify
        if n_together == whole[graphs[0][0]]:  # it is alone in any case
            return None
        times = [self._ms(rows) for _, rows in graphs]
        first = times[0] or 0.0
        if pause_ms <= 0 or self.rested + first > pause_ms:
            return None
        if times[0] is None:
            return graphs[0][0]  # one round tells
        n_rest = n_together - sum(whole[i] for i, _ in graphs)
        rest = verify_ms if n_rest == n_verify else self._joint_ms(n_rest, most)
        apart = sum(first if ms is None else ms for ms in times) + (rest if n_rest else 0.0)
        if apart >= BETTER * self._joint_ms(n_together, most):
            return None
        self._n_picked += 1
        return graphs[0][0] if self._n_picked % DOUBT_EVERY else None

    def expected(self, n_token: int) -> float:
        """Milliseconds of the graph of a prompt; 0: unknown."""
        rows = self.graph_of(n_token)
        return (self._ms(rows) or 0.0) if rows else 0.0

    def _ms(self, rows: int) -> float | None:
        """Milliseconds of a graph, at least, so that a size is tried of which nothing is known; None: none has run."""
        return self.graphs.least_ms(rows) if self.graphs.is_known else None

    def _joint_ms(self, n_row: int, most: int) -> float:
        """Milliseconds of forwards for so many rows, at least, so that a size is tried of which nothing is known."""
        return self.costs.least_ms(min(n_row, most)) * max(1.0, n_row / max(most, 1))
