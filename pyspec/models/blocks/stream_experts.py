"""A feed-forward of experts between several streams: a table of tokens or the router names the experts, and activations are cut."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyspec.cuda.ops.moe.ref import MoeSpec
from pyspec.forward.call import RunInput, Value
from pyspec.forward.trace import Forward, Site
from pyspec.models.blocks.moe import GATES, Experts
from pyspec.models.part import Place
from pyspec.models.read import read_limits
from pyspec.models.stacks import named_experts
from pyspec.models.wants import Want

TABLE = "ffn_gate_tid2eid.weight"  # the experts of each token

Limits = tuple[float, float]
"""Where activations are cut, the experts' and the shared one's; 0: nowhere."""


@dataclass(frozen=True, slots=True)
class StreamExperts(Experts):
    """The feed-forward as data. Its shared expert has a limit of its own, so it runs apart.

    limits   None: those of the file that it is bound from, whose last block it is then
    n_named  tokens whose experts a table names; 0: the router chooses
    """

    limits: Limits | None = None
    n_named: int = 0

    def tensors(self, at: Place) -> dict[str, Want]:
        named = {at.name(TABLE): Want((self.n_named, self.n_used), whole=True)} if self.n_named else {}
        return Experts.tensors(self, at) | named

    def own_limits(self, at: Site) -> Limits:
        if self.limits is not None:
            return self.limits
        layer = int(at.prefix.rpartition(".")[2])
        return read_limits(at.file, layer + 1, one_for_both=True)[layer]

    def spec(self, at: Site) -> MoeSpec:
        return replace(Experts.spec(self, at), limit=self.own_limits(at)[0])

    def joins_shared(self, at: Site, spec: MoeSpec) -> bool:
        return False

    def gates(self, f: Forward, n: Value) -> Value:
        return f.gated(n, *GATES, "silu", self.n_ff_shared, limit=self.own_limits(f.at)[1])

    def named(self, f: Forward) -> RunInput | None:
        if not self.n_named:
            return None
        return RunInput("rows", f.read(named_experts, TABLE, n_expert=self.n_expert))
