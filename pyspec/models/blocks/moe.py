"""A feed-forward of experts, a few of which run for each row, and one shared expert that runs for all; tensors have llama.cpp's names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from pyspec.cuda.ops.moe.ref import Act, MoeSpec, Router, RouteSpec
from pyspec.errors import ModelError
from pyspec.forward.call import RunInput, Value, Weight
from pyspec.forward.trace import Forward, Site
from pyspec.models.cuts import Cut, Units, each_of
from pyspec.models.part import Place, Plain, column_block
from pyspec.models.stacks import AS_THEY_ARE, norm_of_router, router_of, stacks_of, unchanged
from pyspec.models.wants import Want, scale_of

DOWN = "ffn_down_exps.weight"
GATES = "ffn_gate_shexp.weight", "ffn_up_shexp.weight"  # of the shared expert
LATENT = "ffn_latent_down.weight", "ffn_latent_up.weight"
"""To the width in which experts work, where that is not the model's, and back."""


@dataclass(frozen=True, slots=True)
class Experts(Plain):
    """A feed-forward of experts as data.

    n_ff         width of an expert; n_ff_shared that of the shared one, 0 for none
    renorm       weights of a row are divided by their sum, then multiplied with `scale`
    latent       experts work in this width instead of n_embd, between two plain matrices, whose names are `latent_names`; 0 for n_embd
    latent_norm  the name of the norm before the second one; "": none
    shared_gate  the shared expert is multiplied with sigmoid(ffn_gate_inp_shexp . x)
    biased       the choice has a bias; otherwise it has one if the file does
    groups       (all, used): the choice is among the experts of the best groups
    shifted      scores of the router and products of experts have biases
    limit        of gates and ups (`cuda/cut.py`); limit_shared: of the shared expert's
    betas        of the activation `situ`
    block        columns of `ffn_down_exps` that stand together in the file; block_shared: of the shared expert's
    weighs_input  weights of a row multiply what its experts read, and not what they make
    router_norm  the router reads rows behind a norm of its own, whose weights are this tensor's over sqrt(n_embd); "": behind the experts'
    """

    n_expert: int
    n_used: int
    n_ff: int
    n_ff_shared: int = 0
    router: Router = "softmax"
    renorm: bool = True
    scale: float = 1.0
    act: Act = "swiglu"
    latent: int = 0
    shared_gate: bool = False
    biased: bool = False
    groups: tuple[int, int] = (1, 1)
    shifted: bool = False
    limit: float = 0.0
    limit_shared: float = 0.0
    betas: tuple[float, float] = (0.0, 0.0)
    latent_names: tuple[str, str] = LATENT
    latent_norm: str = ""
    router_norm: str = ""
    weighs_input: bool = False
    block: int = 1
    block_shared: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.n_used <= self.n_expert:
            raise ModelError(f"{self.n_used} of {self.n_expert} experts can not be used")
        if self.n_ff < 1:
            raise ModelError(f"experts of width {self.n_ff}")
        n_group, n_kept = self.groups
        if not 0 < n_kept <= n_group or self.n_expert % n_group:
            raise ModelError(f"{n_kept} of {n_group} groups of {self.n_expert} experts can not be used")
        if self.n_used > self.n_expert // n_group * n_kept:
            raise ModelError(
                f"{self.n_used} experts of {n_kept} groups can not be used: they have fewer"
            )
        if self.latent and self.shared_gate:
            raise ModelError("a gated shared expert beside experts of another width is not supported")

    @property
    def inner(self) -> tuple[str, ...]:
        """The matrices before the activation."""
        return ("up",) if self.act == "relu2" else ("gate", "up")

    @property
    def n_inner(self) -> int:
        """Inner values of a row, of all experts that it uses."""
        return self.n_used * self.n_ff + self.n_ff_shared

    def tensors(self, at: Place) -> dict[str, Want]:
        n, f, e = self.latent or at.n_embd, self.n_ff, self.n_expert
        inner = (Units(f, "columns of an expert", block=self.block),)
        wants = {
            at.name("ffn_gate_inp.weight"): Want((e, at.n_embd)),
            at.name("exp_probs_b.bias"): Want((e,), optional=not self.biased),
        }
        if at.has("ffn_gate_up_exps.weight") and self.act != "relu2":
            wants[at.name("ffn_gate_up_exps.weight")] = Want((e, 2 * f, n), cut=Cut(1, inner * 2))
        else:
            wants |= {
                at.name(f"ffn_{x}_exps.weight"): Want((e, f, n), cut=Cut(1, inner)) for x in self.inner
            }
        wants[at.name("ffn_down_exps.weight")] = Want((e, n, f), cut=Cut(2, inner))
        if self.shifted:
            wants |= {at.name(f"ffn_{x}_exps.bias"): Want((e, f), cut=Cut(1, inner)) for x in self.inner}
            wants[at.name("ffn_down_exps.bias")] = Want((e, n))
            wants[at.name("ffn_gate_inp.bias")] = Want((e,))
        if self.router_norm:
            wants[at.name(self.router_norm)] = Want((at.n_embd,))
        if self.latent:
            down, up = self.latent_names
            wants |= {at.name(down): Want((n, at.n_embd)), at.name(up): Want((at.n_embd, n))}
        if self.latent_norm:
            wants[at.name(self.latent_norm)] = Want((n,))
        return wants | self._shared_tensors(at)

    def _shared_tensors(self, at: Place) -> dict[str, Want]:
        f, n = self.n_ff_shared, at.n_embd
        if not f:
            return {}
        columns = (Units(f, "columns of the shared expert", block=self.block_shared),)
        up = Want((f, n), cut=Cut(0, columns))
        wants = {at.name(f"ffn_{x}_shexp.weight"): up for x in self.inner}
        wants[at.name("ffn_down_shexp.weight")] = Want((n, f), cut=Cut(1, columns))
        if self.shared_gate:
            wants[at.name("ffn_gate_inp_shexp.weight")] = Want((n,), also=((1, n),))
        return wants

    def share(self, n: int) -> Self:
        """All experts, and of each one as many columns."""
        shared = each_of(self.n_ff_shared, n, self.block_shared)
        return replace(self, n_ff=each_of(self.n_ff, n, self.block), n_ff_shared=shared)

    def of_file(self, at: Place) -> Self:
        """See `PartSpec.of_file`."""
        own, shared = (column_block(at, f"ffn_down_{x}.weight") for x in ("exps", "shexp"))
        return replace(self, block=own, block_shared=shared)

    def factored(self, at: Place) -> bool:
        """Whether experts' outputs have factors that may be their rows' weights': those multiply outputs, and no biases."""
        return at.has(scale_of(DOWN)) and not (self.weighs_input or self.shifted)

    def spec(self, at: Site) -> MoeSpec:
        """Of the experts at this place, with the shared one where one launch multiplies it with the others; beside experts in the host's
        memory it is a product of its own."""
        names = {x: f"ffn_{x}_exps.weight" for x in ("gate", "up", "down", "gate_up")}
        if self.act != "relu2" and at.has(names["gate_up"]):
            names["gate"] = names["up"] = names["gate_up"]
        scaled = {*names.values()} - ({DOWN} if self.factored(at) else set())
        gate, up, down = (
            at.type_of(names[x]) if at.dense is None and at.has(names[x]) else None
            for x in ("gate", "up", "down")
        )
        spec = MoeSpec(
            at.device,
            1 if self.weighs_input else self.n_used,
            self.latent or at.n_embd,
            self.n_ff,
            self.act,
            up,
            down,
            any(at.has(scale_of(name)) for name in scaled),
            n_expert=self.n_expert,
            limit=self.limit,
            gate=None if gate is up else gate,
            biased=self.shifted,
            slots=at.slots,
            betas=self.betas,
        )
        if spec.slots is not None:
            return spec
        with_shared = replace(spec, pieces=self.n_ff_shared // self.n_ff)
        joins = at.streams and self.joins_shared(at, spec) and at.takes("moe", with_shared)
        return with_shared if joins else spec

    def joins_shared(self, at: Site, spec: MoeSpec) -> bool:
        """Whether one launch may take the shared expert as further experts: of their input, their types, and as wide as a number of them, in
        whole blocks of the type of `down`."""
        reads_others = self.latent or self.weighs_input
        if not self.n_ff_shared or reads_others or spec.down is None or self.n_ff_shared % self.n_ff:
            return False
        if self.limit != self.limit_shared:
            return False
        if self.n_ff_shared != self.n_ff and self.n_ff % spec.down.block_size:
            return False
        types = dict.fromkeys(self.inner, spec.up) | {"down": spec.down}
        names = {x: f"ffn_{x}_shexp.weight" for x in types}
        return all(
            at.has(name) and at.type_of(name) is types[x] and (spec.scaled or not at.has(scale_of(name)))
            for x, name in names.items()
        )

    def forward(self, f: Forward, x: Value, stream: Value | None) -> Value:
        """What needs no choice comes before it."""
        spec, stream = self.spec(f.at), stream if f.at.leads else None
        n = f.norm_apart(x, f.vector(f"{f.at.norm}.weight")) if self.weighs_input else f.normed(x)
        shared, v = None, n
        if self.n_ff_shared and not spec.pieces:
            shared, v = self._shared(f, n)
        if self.latent and v is n:
            v = f.product(n, self.latent_names[0], n_out=self.latent)
        if shared is not None and not self.shared_gate:
            stream, shared = f.add(stream, shared), None
        routes = self._routed(f, x)
        if self.weighs_input:
            v = f.op("weighed", None, v, routes, shape=(self.n_used * v.width,))
            routes = f.op("unweighed", None, routes, shape=routes.shape)
        stacks = f.read(stacks_of, "ffn", spec=spec, factored=self.factored(f.at))
        y = f.experts(spec, v, routes, shared, stacks)
        if self.weighs_input and self.n_used > 1:
            y = f.op("of_choices", None, y, self.n_used, shape=(spec.n_in,))
        if self.latent_norm:  # of the sum of all ranks, which then goes with the first one's stream
            y = f.norm_apart(f.over_ranks(y), f.vector(self.latent_norm))
        if self.latent:
            y = f.product(y, self.latent_names[1], n_out=x.width)
        if self.latent_norm and not f.at.leads:
            y = f.scaled(y, 0.0)
        return f.over_ranks(f.add(stream, y))

    def _routed(self, f: Forward, x: Value) -> Value:
        """The choice of each row, which the router norms itself."""
        named, gate = self.named(f), ["ffn_gate_inp_shexp.weight"] * self.shared_gate
        bias = f.optional("exp_probs_b.bias") if named is None else None
        own = self.n_expert, self.n_used, self.router, self.renorm, self.scale
        n_group, n_kept = self.groups
        spec = RouteSpec(
            f.device,
            f.at.n_embd,
            *own,
            biased=bias is not None,
            gated=self.shared_gate,
            eps=f.eps,
            given=named is not None,
            n_group=n_group,
            n_group_used=n_kept,
            shifted=self.shifted,
            factored=self.factored(f.at),
        )
        if self.router_norm:
            norm = f.read(norm_of_router, self.router_norm)
        elif f.at.norm:
            norm = f.vector(f"{f.at.norm}.weight")
        else:
            norm, spec = f.read(unchanged, n=x.width), replace(spec, eps=AS_THEY_ARE)
        matrix = f.read(router_of, "ffn_gate_inp.weight", *gate)
        beside = {"shift": f.vector("ffn_gate_inp.bias")} if self.shifted else {}
        if spec.factored:
            beside["factors"] = Weight("factors", (DOWN,), (("n", self.n_expert),))
        return f.op("moe_route", spec, x, norm, matrix, bias, named, shape=(2 * self.n_used,), **beside)

    def named(self, f: Forward) -> RunInput | None:
        """The rows' experts by a table of tokens; None: the router chooses."""
        return None

    def gates(self, f: Forward, n: Value) -> Value:
        """Inner values of a gated shared expert."""
        if self.act == "situ":
            return f.situ(n, *GATES, self.n_ff_shared, self.betas)
        return f.gated(n, *GATES, "silu", self.n_ff_shared, limit=self.limit_shared)

    def _shared(self, f: Forward, n: Value) -> tuple[Value, Value]:
        """The shared expert's output, and the rows that the others read. Its first product also projects them to their width, if both
        matrices are of one type: one launch instead of two."""
        up, down, n_ff = "ffn_up_shexp.weight", "ffn_down_shexp.weight", self.n_ff_shared
        if self.act in ("swiglu", "situ"):
            return f.product(self.gates(f, n), down, n_out=n.width), n
        v = n
        # the columns behind the latent part are read four at once
        if (
            self.latent
            and self.latent % 4 == 0
            and f.at.type_of(self.latent_names[0]) is f.at.type_of(up)
        ):
            both = f.product(n, self.latent_names[0], up, n_out=self.latent + n_ff)
            v, y = f.split(both, (self.latent, n_ff))
        else:
            y = f.product(n, up, n_out=n_ff)
        return f.product(f.relu2(y), down, n_out=n.width), v
