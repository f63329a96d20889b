"""Each rule turns calls into one call of a launch, keeps the order of the rest, and touches nothing else."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyspec.cuda.streamed import Streamed, StreamedParts
from pyspec.forward import rewrite
from pyspec.forward.call import ForwardProgram, OpCall, Value, Weight
from pyspec.forward.lower import ProgramText
from pyspec.forward.trace import Forward, traced
from pyspec.gguf import GGMLType
from pyspec.models.blocks.moe import Experts

N = 4


def site(*missing: str) -> Any:
    """Where every tensor is, but these."""
    own = SimpleNamespace(
        device=torch.device("cpu"),
        kv=None,
        n_embd=N,
        eps=1e-5,
        norm="n",
        layer=0,
        flags=None,
        n_rank=1,
        leads=True,
        dense=None,
        streams=False,
        slots=None,
    )
    own.type_of = lambda name: GGMLType.F32
    own.takes = lambda op, spec: True
    own.has = lambda name: name not in missing
    own.behind = lambda norm: SimpleNamespace(**{**vars(own), "norm": norm})
    return own


def program(block: Callable[..., Value], *missing: str, n_input: int = 1) -> ForwardProgram:
    return traced(block, site(*missing), *[N] * n_input)


def ops(found: ForwardProgram) -> list[str]:
    return [call.op for call in found.calls]


def preparation(call: OpCall) -> str | None:
    return call.inputs[1].op if isinstance(call.inputs[1], OpCall) else None


class Launches:
    """Weights and launches by their names."""

    device = torch.device("cpu")

    def __init__(self, **launches: Any) -> None:
        self.launches = launches

    def weight(self, weight: Weight) -> Any:
        return self.launches.get(weight.names[0])

    def launch(self, op: str, spec: Any) -> Any:
        return self.launches.get(op)

    def loaded(self, call: OpCall) -> Any:
        return self.launches.get("experts")

    def few(self, bias: Weight) -> Any:
        return self.launches.get("few")


def test_rows_into_products() -> None:
    """Two products that read one norm do it both; an activation goes into the product behind it."""

    def block(f: Forward, x: Value) -> Value:
        n = f.normed(x)
        return f.add(
            f.product(n, "a", n_out=N), f.product(f.relu2(f.product(n, "b", n_out=N)), "c", n_out=N)
        )

    found = program(block)
    assert ops(found) == ["norm", "product", "product", "relu2", "product", "add"]
    rewrite.rows_into_products(found)
    assert ops(found) == ["product", "product", "product", "add"]
    assert [preparation(call) for call in found.calls[:3]] == ["norm", "norm", "relu2"]
    assert found.calls[0].inputs[0] is found.calls[1].inputs[0] is found.inputs[0]
    assert found.read_once(found.calls[1].output), (
        "by the product, and not once more by what it does on the way"
    )


def test_a_norm_that_something_else_reads_stays() -> None:
    def block(f: Forward, x: Value) -> Value:
        n = f.normed(x)
        return f.add(n, f.product(n, "a", n_out=N))

    found = program(block)
    rewrite.rows_into_products(found)
    assert ops(found) == ["norm", "product", "add"]


def test_sums_into_products() -> None:
    found = program(lambda f, x: f.add(x, f.product(f.normed(x), "a", n_out=N)))
    rewrite.sums_into_products(found)
    assert ops(found) == ["norm", "product"] and found.calls[1].inputs[2] is found.inputs[0]
    assert found.output is found.calls[1].output


def of_gates(f: Forward, x: Value) -> Value:
    return f.add(x, f.gated(x, "gate", "up", "silu", N))


def read_twice(f: Forward, x: Value) -> Value:
    y = f.product(x, "a", n_out=N)
    return f.add(f.add(x, y), y)


def made_later(f: Forward, x: Value) -> Value:
    y = f.product(x, "a", n_out=N)
    return f.add(f.scaled(x, 2.0), y)


@pytest.mark.parametrize("block", [of_gates, read_twice, made_later])
def test_a_sum_stays_behind_gates_a_product_that_others_read_or_a_stream_that_comes_later(
    block: Callable[..., Value],
) -> None:
    found = program(block)
    before = ops(found)
    rewrite.sums_into_products(found)
    assert ops(found) == before


def test_sums_into_norms() -> None:
    """With the factor behind. A sum of two norms is none of a stream."""

    def block(f: Forward, x: Value) -> Value:
        y = f.product(f.normed(x), "a", n_out=N)
        return f.scaled(f.add(x, f.norm_apart(y, f.vector("post"))), 0.5)

    found = program(block)
    rewrite.sums_into_norms(found)
    assert ops(found) == ["norm", "product", "norms.added"]
    assert found.calls[2].inputs[2:] == (found.inputs[0], 0.5) and found.output is found.calls[2].output

    def two(f: Forward, x: Value) -> Value:
        return f.add(*(f.norm_apart(x, f.vector(name)) for name in "ab"))

    found = program(two)
    rewrite.sums_into_norms(found)
    assert ops(found) == ["norms", "norms", "add"]


def feed(f: Forward, x: Value) -> Value:
    return f.add(x, f.product(f.gated(f.normed(x), "gate", "up", "silu", N), "down", n_out=N))


def test_results_handed_on() -> None:
    """Where gates are cut, which bounds what they give, and something runs both products so."""

    def block(f: Forward, x: Value, limit: float = 3.0) -> Value:
        y = f.gated(f.normed(x), "gate", "up", "silu", N, limit=limit)
        return f.add(x, f.product(y, "down", n_out=N))

    def after(block: Callable[..., Value], hands: object) -> list[OpCall]:
        found = rewrite.plain(program(block))
        bound, heard = Launches(), []
        bound.handing = lambda *given: heard.append(given) or hands  # type: ignore[attr-defined]
        rewrite.results_handed_on(found, bound)
        assert all(bound == 9.0 for _, _, bound in heard)
        return found.calls

    (both,) = after(block, "hands")
    assert (both.op, preparation(both), both.spec.names) == ("handed", "norm", ("gate", "up"))
    assert both.inputs[3] == "hands" and both.inputs[4].names == ("down",)
    for other in (after(block, None), after(lambda f, x: block(f, x, 0.0), "hands")):
        assert [call.op for call in other] == ["product", "product"]


def test_activations_into_products_that_can_leave_them() -> None:
    """If a gated product can leave its activation to the next product, it does."""
    able = SimpleNamespace(unfinished=lambda x, prep: None)
    for gates, want in ((able, ["unfinished", "product"]), (object(), ["product", "product"])):
        found = rewrite.plain(program(feed))
        rewrite.activations_into_products(found, Launches(gate=gates))
        assert ops(found) == want
    assert found.calls[1].inputs[1] is None


def test_sums_of_few_rows() -> None:
    """Only biases that say so."""
    for few, want in ((True, ["biased"]), (False, ["product", "add"])):
        found = rewrite.plain(
            program(
                lambda f, x, few=few: f.biased(
                    f.product(f.normed(x), "a", n_out=N), f.vector("b"), few=few
                )
            )
        )
        rewrite.sums_of_few_rows(found, Launches(few=torch.ones(2, N)))
        assert ops(found) == want
    rewrite.sums_of_few_rows(found, Launches())
    assert ops(found) == ["product", "add"], "a device whose products do not add them"


def heads(f: Forward, x: Value) -> Value:
    y = f.op("gdn", "spec", x, f.batch, shape=(2, N // 2))
    return f.summed(f.head_norm(f.flat(y), f.vector("w"), x, N // 2), "out", N, x)


def test_rows_from_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    for able, want in ((True, ["then"]), (False, ["gdn", "view", "product"])):
        monkeypatch.setattr(rewrite.fuse, "writes_rows_of", lambda launch, product, able=able: able)
        found = rewrite.plain(program(heads))
        rewrite.rows_from_launches(found, Launches(gdn=object()))
        assert ops(found) == want


def test_weights_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through views, to the launch whose output the product reads."""

    def block(f: Forward, x: Value) -> Value:
        y = f.op("attend", "spec", x, shape=(2, N // 2))
        return f.product(f.flat(y), "out", n_out=N)

    monkeypatch.setattr(rewrite.fuse, "read_next", lambda launch, product: {"after": (launch, product)})
    found = rewrite.plain(program(block))
    rewrite.weights_ahead(found, Launches(attend="launch", out="product"))
    assert found.calls[0].more == {"after": ("launch", "product")}


def of_experts(f: Forward, x: Value, **how: Any) -> Value:
    return Experts(8, 2, N, **how).forward(f, x, x)


LATENT = {"latent": 2, "act": "relu2"}


def test_experts_norm_their_rows_and_add_the_stream() -> None:
    """The router reads rows as they are. A shared expert adds the stream on its way, and a gated one leaves that to the others."""
    found = rewrite.plain(program(of_experts, "exp_probs_b.bias"))
    assert ops(found) == ["moe_route", "moe"]
    assert preparation(found.calls[1]) == "norm" and found.calls[1].inputs[2] is found.inputs[0]
    beside = rewrite.plain(program(lambda f, x: of_experts(f, x, n_ff_shared=6)))
    assert ops(beside) == ["product", "product", "moe_route", "moe"]
    assert beside.calls[1].inputs[2] is beside.inputs[0]
    assert beside.calls[3].inputs[2] is beside.calls[1].output
    gated = rewrite.plain(program(lambda f, x: of_experts(f, x, n_ff_shared=6, shared_gate=True)))
    assert gated.calls[1].inputs[2] is None
    assert gated.calls[3].inputs[2] is gated.inputs[0]
    assert gated.calls[3].inputs[4] is gated.calls[1].output


def test_the_shared_expert_runs_with_the_others_where_a_launch_takes_it() -> None:
    def joined(streams: bool, takes: bool, **how: Any) -> list[str]:
        at = site("ffn_gate_up_exps.weight", *(f"ffn_{x}_{y}.scale" for x in KINDS for y in WHOSE))
        at.streams, at.takes = streams, lambda op, spec: takes
        return ops(traced(lambda f, x: of_experts(f, x, n_ff_shared=2 * N, **how), at, N))

    assert joined(True, True) == ["norm", "moe_route", "moe", "add"]
    apart = ["norm", "product", "product", "add", "moe_route", "moe", "add"]
    assert joined(False, True) == joined(True, False) == apart
    assert joined(True, True, **LATENT).count("product") == 4, "whose input is another"


def test_a_shared_expert_is_apart_beside_experts_in_the_hosts_memory() -> None:
    at = site("ffn_gate_up_exps.weight", *(f"ffn_{x}_{y}.scale" for x in KINDS for y in WHOSE))
    at.streams = True
    for slots, pieces in ((None, 2), (0, 0), (5, 0)):
        at.slots = slots
        spec = Experts(8, 2, N, n_ff_shared=2 * N).spec(at)
        assert (spec.slots, spec.pieces) == (slots, pieces)


KINDS, WHOSE = ("gate", "up", "down", "gate_up"), ("exps", "shexp")


def test_of_several_ranks_one_adds_the_stream() -> None:
    for leads in (True, False):
        at = site()
        at.n_rank, at.leads = 2, leads
        found = rewrite.plain(traced(of_experts, at, N))
        assert ops(found) == ["moe_route", "moe", "rank_sum"]
        assert found.calls[1].inputs[2] is (found.inputs[0] if leads else None)
        found = rewrite.plain(traced(heads, at, N))
        assert ops(found) == ["gdn", "view", "product", "rank_sum"], "rows are prepared for a rank's own"
        assert found.calls[2].inputs[2] is (found.inputs[0] if leads else None)


def test_rows_before_choices() -> None:
    """By the router, if it norms the same rows; otherwise by a launch before it, if experts take such rows."""

    def after(block: Callable[..., Value] = of_experts, *, writes: bool, readies: bool) -> list[str]:
        found = rewrite.plain(program(block))
        experts = SimpleNamespace(readies=readies, norms=True)
        route = SimpleNamespace(writes_rows=True) if writes else object()
        rewrite.rows_before_choices(found, Launches(moe_route=route, experts=experts))
        return ops(found)

    assert after(writes=True, readies=True) == ["moe.routed"]
    assert after(writes=False, readies=True) == ["moe.prepare", "moe_route", "moe"]
    assert after(writes=True, readies=False) == ["moe_route", "moe"]
    before = ["product", "moe.prepare", "moe_route", "moe", "product"]
    assert after(lambda f, x: of_experts(f, x, **LATENT), writes=True, readies=True) == before
    other = after(lambda f, x: of_experts(f, x, router_norm="r"), writes=True, readies=True)
    assert other == ["moe.prepare", "moe_route", "moe"]


def test_experts_that_begin_early_do_so_before_all_that_needs_no_choice() -> None:
    def after(block: Callable[..., Value], begins: bool = True) -> ForwardProgram:
        found = rewrite.plain(program(block))
        experts = SimpleNamespace(begins=begins, readies=False)
        rewrite.misses_before_others(found, Launches(experts=experts))
        return found

    def between(f: Forward, x: Value) -> Value:
        y = f.product(f.op("gdn", "spec", x, shape=(N,)), "out", n_out=N)
        return of_experts(f, f.add(x, y), n_ff_shared=6, shared_gate=True)

    found = after(between)
    want = ["gdn", "product", "moe_route", "moe.begin", "product", "product", "moe"]
    assert ops(found) == want
    begin, moe = found.calls[3], found.calls[-1]
    assert (
        moe.inputs[5] is begin.output and begin.loads is moe.loads and begin.inputs[2] is moe.inputs[3]
    )
    assert begin.inputs[:2] == moe.inputs[:2] and preparation(begin) == "norm"
    assert ops(after(between, begins=False)) == ["gdn", "product", "product", "product", "moe_route", "moe"]  # fmt: skip
    latent = after(lambda f, x: of_experts(f, x, **LATENT))
    assert ops(latent) == ["moe_route", "product", "moe.begin", "moe", "product"], (
        "rows have to be there"
    )


def test_shares_into_products() -> None:
    for sums, want in ((True, ["moe.then"]), (False, ["moe", "product"])):
        found = rewrite.plain(program(lambda f, x: of_experts(f, x, **LATENT)))
        experts = SimpleNamespace(readies=True, norms=True, sums_for=lambda product, sums=sums: sums)
        bound = Launches(experts=experts)
        rewrite.rows_before_choices(found, bound)
        rewrite.shares_into_products(found, bound)
        assert ops(found) == ["product", "moe.prepare", "moe_route", *want]
        assert found.calls[-1].inputs[2 if want[-1] == "product" else 4] is found.inputs[0]


def in_groups(f: Forward, x: Value) -> Value:
    o = f.op("sparse_attend", "spec", x, f.batch, shape=(2, N // 2))
    o.means_of = f.vector("norms")
    y = f.grouped(f.flat(o), "groups", 2, N)
    return f.summed(y, "out", N, x)


def test_results_of_groups_handed_on() -> None:
    """Their bound is that of the rows' norms over a group's columns, since rows are means."""
    found, heard = rewrite.plain(program(in_groups)), []
    bound = Launches(norms=torch.tensor([0.5, -3.0]))
    bound.handing = lambda *given: heard.append(given) or "hands"  # type: ignore[attr-defined]
    rewrite.results_handed_on(found, bound)
    assert ops(found) == ["sparse_attend", "view", "handed"]
    assert heard[0][2] == 3.0 * (N // 2) ** 0.5 and found.calls[2].inputs[2] is found.inputs[0]


def test_rows_into_groups() -> None:
    for able, want in (
        (True, ["attended", "product"]),
        (False, ["sparse_attend", "view", "grouped", "product"]),
    ):
        found = rewrite.plain(program(in_groups))
        launch = SimpleNamespace(prepared=None) if able else object()
        groups = SimpleNamespace(few=object.__new__(StreamedParts))
        bound = Launches(sparse_attend=launch, groups=groups, norms=torch.ones(2))
        bound.handing = lambda *given: "hands"  # type: ignore[attr-defined]
        rewrite.rows_into_groups(found, bound)
        assert ops(found) == want
    assert found.readers(found.calls[2].output) == [found.calls[3]]


def compressed(f: Forward, x: Value, n: int = 2) -> Value:
    """Keys and `n` compressed rows of the first product, queries of the second one."""
    q, kv, *rest = f.split(f.product(x, "first", n_out=(2 + n) * N), [N] * (2 + n))
    q = f.view(f.product(q, "second", n_out=N), ".view(-1, 2, 2)", (2, 2))
    for own in rest:
        values, scores = f.split(own, (N // 2, N // 2))
        f.op(
            "compress",
            "spec",
            values,
            scores,
            "places",
            "norm",
            "freq",
            "ring",
            "pool",
            f.batch,
            shape=(),
        )
    return f.op("sparse_attend", "spec", q, kv, "tail", None, None, None, f.batch, shape=(2, 2))


def able_beside() -> Launches:
    attend = SimpleNamespace(take_keys=None, keys_beside=None)
    beside = Beside()
    return Launches(second=object.__new__(Streamed), sparse_attend=attend, compress=beside)


class Beside:
    runs_beside = True

    def with_beside(self, other: object) -> str:
        return "both"


def test_keys_beside_products() -> None:
    found, bound = program(compressed), able_beside()
    rewrite.keys_beside_products(found, bound)
    kinds = [op for op in ops(found) if op != "view"]
    assert kinds == ["product", "keys_room", "product", "compress", "compress", "put_keys", "sparse_attend"]  # fmt: skip
    room, second, *others = [call for call in found.calls if call.op not in ("view", "sparse_attend")][
        1:
    ]
    own, late = room.outputs
    assert len(room.inputs[2]) == 3, "all that the first product gives, but for what queries are made of"
    assert second.more == {"late": late} and [c.more for c in others[:2]] == [{"beside": late}] * 2
    assert others[2].inputs[-1] is own
    for other in ("second", "sparse_attend", "compress"):
        found, bound = program(compressed), able_beside()
        bound.launches[other] = object()
        rewrite.keys_beside_products(found, bound)
        assert "keys_room" not in ops(found)


def test_keys_are_beside_products_before_attention_writes_rows() -> None:
    def block(f: Forward, x: Value) -> Value:
        o = compressed(f, x)
        o.means_of = f.vector("norms")
        return f.product(f.grouped(f.flat(o), "groups", 2, N), "out", n_out=N)

    found, bound = program(block), able_beside()
    bound.launches["sparse_attend"].prepared = None
    groups = SimpleNamespace(few=object.__new__(StreamedParts))
    bound.launches |= {"groups": groups, "norms": torch.ones(2)}
    bound.handing = lambda *given: None  # type: ignore[attr-defined]
    for rule in rewrite.BOUND[:3]:
        rule(found, bound)
    kinds = [op for op in ops(found) if op != "view"]
    assert kinds == ["product", "keys_room", "product", "both", "put_keys", "attended", "product"]


def test_compressors_together() -> None:
    for n, want in ((2, ["both"]), (1, ["compress"])):
        found = program(lambda f, x, n=n: compressed(f, x, n))
        rewrite.compressors_together(found, able_beside())
        assert [op for op in ops(found) if op in ("compress", "both")] == want
    found = program(compressed)
    rewrite.compressors_together(found, Launches())
    assert ops(found).count("compress") == 2


def test_bytes_of_a_row_are_those_of_the_values_that_live_at_once() -> None:
    """Of a feed-forward: the stream, and the gates beside their input or their output. Views cost nothing."""
    assert rewrite.plain(program(feed)).peak() == 4 * 3 * N
    wide = program(
        lambda f, x: f.product(f.split(f.product(x, "a", n_out=10 * N), (N, 9 * N))[0], "b", n_out=N)
    )
    assert wide.peak() == 4 * 12 * N


def test_text_has_a_line_a_call_and_lets_go_of_what_is_read() -> None:
    sources = Launches(gate="G", down="D")
    sources.norm = lambda weight, eps: "norm"  # type: ignore[attr-defined]
    made = ProgramText(rewrite.plain(program(feed)), sources)  # type: ignore[arg-type]
    lines = [line.strip() for line in made.text.splitlines()]
    assert lines[0] == "def forward(v0, run):" and lines[-1] == "return v2"
    assert lines[1].startswith("v1 = c") and lines[2].startswith("v2 = c") and lines[3] == "del v1"
    assert lines[2].endswith("(v1, None, v0)")
