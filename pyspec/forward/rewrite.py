"""Rules: several calls of a program become one that a launch can do at once. Each rule keeps the program's result.

Rules of the first list hold for every device. Those of the second ask the launches that a block is bound to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from pyspec.cuda import fuse
from pyspec.cuda.ops.rows.ref import Norm, norm_power
from pyspec.forward.call import ForwardProgram, OpCall, RunInput, Value, Weight

PREPARES = ("norm", "head_norm", "group_norm", "head_gate", "relu2")


class Launches(Protocol):
    """Launches, weights and inputs of a block's forward."""

    @property
    def device(self) -> torch.device: ...
    def weight(self, weight: Weight) -> Any: ...
    def launch(self, op: str, spec: Any) -> Any: ...
    def runs(self, call: OpCall) -> Any:
        """The launch of any other call."""
        ...

    def norm(self, weight: Weight, eps: float) -> Norm: ...
    def few(self, bias: Weight) -> Tensor | None: ...
    def handing(self, first: Weight, next: Weight, bound: float) -> Any:
        """A call that runs a product, whose results are no larger than this, into the next one's rows; None where no kernel does."""
        ...

    def loaded(self, call: OpCall) -> Any:
        """The launch of a call, loaded with its weights (`OpCall.loads`)."""
        ...

    def given(self, x: RunInput) -> str:
        """The expression that reads it from the forward's argument `run`."""
        ...


def rows_into_products(program: ForwardProgram) -> None:
    """A norm, gate or activation that only products read is done by them, on the way to their rows. Experts norm their rows likewise."""
    for prep in [call for call in program.calls if call.op in PREPARES]:
        readers = program.readers(prep.output)
        able = ("product", "moe") if prep.op == "norm" else ("product",)
        fits = all(c.op in able and c.inputs[:2] == (prep.output, None) for c in readers)
        if prep.output is program.output or not readers or not fits:
            continue
        inner = OpCall(prep.op, prep.spec, (None, *prep.inputs[1:]), ())  # of its reader's rows
        for product in readers:
            product.inputs = (prep.inputs[0], inner, *product.inputs[2:])
        program.calls.remove(prep)


def sums_into_products(program: ForwardProgram) -> None:
    """A stream is added by the product, or by the experts, whose output alone it is added to."""
    for add in [call for call in program.calls if call.op == "add"]:
        stream, y = add.inputs
        product = program.maker(y)
        if product is None or product.op not in ("product", "moe") or product.inputs[2] is not None:
            continue
        if product.op == "product" and product.spec.kind == "gated":
            continue
        if not program.read_once(y) or not _before(program, stream, product):
            continue
        product.inputs = (*product.inputs[:2], stream, *product.inputs[3:])
        product.outputs = add.outputs
        program.calls.remove(add)


def sums_into_norms(program: ForwardProgram) -> None:
    """A stream, which others read, too, is added by the norm behind a part, and multiplied with a factor."""
    for add in [call for call in program.calls if call.op == "add"]:
        stream, y = add.inputs
        norm = program.maker(y)
        if norm is None or norm.op != "norms" or not program.read_once(y):
            continue
        if program.read_once(stream) or not _before(program, stream, norm):
            continue
        norm.op, norm.inputs, norm.outputs = "norms.added", (*norm.inputs, stream), add.outputs
        program.calls.remove(add)
        (scale,) = program.readers(norm.output)[:1] or (None,)
        if scale is not None and scale.op == "scaled" and program.read_once(norm.output):
            norm.inputs, norm.outputs = (*norm.inputs, scale.inputs[1]), scale.outputs
            program.calls.remove(scale)


def _before(program: ForwardProgram, x: Any, call: OpCall) -> bool:
    """Whether x is made before this call; weights are not summed in products."""
    if not isinstance(x, Value):
        return False
    maker = program.maker(x)
    return maker is None or program.calls.index(maker) < program.calls.index(call)


def results_handed_on(program: ForwardProgram, bound: Launches) -> None:
    """Of few rows, a product whose results have a bound writes the rows of the next one."""
    for product in [call for call in program.calls if call.op == "product"]:
        first = program.maker(product.inputs[0])
        if first is None or product.inputs[1] is not None or not program.read_once(product.inputs[0]):
            continue
        if (hands := _handing(program, first, product, bound)) is not None:
            prep = first.inputs[1] if first.op == "product" else None
            product.inputs = (first.inputs[0], prep, product.inputs[2], hands, product.spec)
            product.op, product.spec = "handed", first.spec
            program.calls.remove(first)


def _handing(program: ForwardProgram, first: OpCall, product: OpCall, bound: Launches) -> Any:
    """The call that runs both products, or None where there is no such kernel."""
    if first.op == "product":  # silu of a cut value is no larger
        most = dict(first.spec.how).get("limit", 0.0) ** 2
    else:
        means = _behind_views(program, first.inputs[0]) if first.op == "grouped" else None
        if means is None or means.means_of is None:
            return None
        norms, n = bound.weight(means.means_of), first.inputs[0].width // dict(first.spec.how)["n_group"]
        most = float(norms.abs().amax()) * n**0.5
    return bound.handing(first.spec, product.spec, most) if most else None


def _behind_views(program: ForwardProgram, value: Value) -> Value:
    while (maker := program.maker(value)) is not None and maker.op == "view":
        value = maker.inputs[0]
    return value


def rows_into_groups(program: ForwardProgram, bound: Launches) -> None:
    """Of few rows, attention writes the rows of the product in groups behind it, which may hand on its own to the next product."""
    for grouped in [call for call in program.calls if call.op == "grouped"]:
        means = _behind_views(program, grouped.inputs[0])
        launch, flat = program.maker(means), program.maker(grouped.inputs[0])
        if launch is None or flat is None or means.means_of is None or flat.inputs[0] is not means:
            continue
        runs = bound.launch(launch.op, launch.spec)
        if not fuse.writes_groups(runs, bound.weight(grouped.spec)):
            continue
        (reader,) = program.readers(grouped.output)
        plain = reader.op == "product" and reader.inputs[1] is None
        hands = _handing(program, grouped, reader, bound) if plain else None
        power = norm_power(bound.weight(means.means_of))
        grouped.op, grouped.inputs = "attended", (launch, grouped.spec, power, hands)
        for gone in (flat, launch):
            program.calls.remove(gone)


def keys_beside_products(program: ForwardProgram, bound: Launches) -> None:
    """New keys, and rows of compressors, are made beside the product of few rows that makes queries: they read nothing of it."""
    for attend in [call for call in program.calls if call.op == "sparse_attend"]:
        q, kv, tail, *_, batch = attend.inputs
        product, split = (program.maker(_behind_views(program, q)), program.maker(kv))
        beside = [call for call in program.calls if call.op == "compress"]
        if product is None or product.op != "product" or split is None:
            continue
        runs = bound.launch(attend.op, attend.spec)
        launches = tuple(bound.launch(call.op, call.spec) for call in beside)
        if not fuse.makes_keys_beside(runs, launches, bound.weight(product.spec)):
            continue
        own, late, put = Value(kv.shape), Value(()), Value(())
        given = runs, product.spec, split.outputs[1:]
        program.calls.insert(program.calls.index(product), OpCall("keys_room", None, given, (own, late)))
        product.more["late"] = late
        for call in beside:
            call.more["beside"] = late
        last = max(program.calls.index(call) for call in (product, *beside))
        program.calls.insert(last + 1, OpCall("put_keys", None, (runs, kv, tail, batch, own), (put,)))


def compressors_together(program: ForwardProgram, bound: Launches) -> None:
    """Two compressors of the same tokens run in one launch."""
    found = [call for call in program.calls if call.op == "compress"]
    if len(found) != 2:
        return
    one, other = found
    both = fuse.both(*(bound.launch(call.op, call.spec) for call in found))
    if both is not None:
        freq, batch = one.inputs[4], one.inputs[-1]
        pairs = tuple((*call.inputs[:4], *call.inputs[5:7]) for call in found)
        other.op, other.spec, other.inputs = "both", both, (*pairs, freq, batch)
        program.calls.remove(one)


def activations_into_products(program: ForwardProgram, bound: Launches) -> None:
    """The last step of a gated product may be left to the preparation of the next product's rows."""
    for product in [call for call in program.calls if call.op == "product"]:
        first = program.maker(product.inputs[0])
        if first is None or first.op != "product" or product.inputs[1] is not None:
            continue
        if not program.read_once(first.output):
            continue
        if not fuse.leaves_rest(bound.weight(first.spec)):
            continue
        left = Value(())
        first.op, first.outputs = "unfinished", (first.output, left)
        product.inputs = (product.inputs[0], left, product.inputs[2])


def sums_of_few_rows(program: ForwardProgram, bound: Launches) -> None:
    """The biases of a product go with it as the residual of its few rows, which saves a launch of its own, where kernels are a GPU's."""
    for add in [call for call in program.calls if (call.op, call.spec) == ("add", "few")]:
        y, bias = add.inputs
        product = program.maker(y)
        if product is None or product.op != "product":
            continue
        if product.inputs[2] is not None or not program.read_once(y) or bound.few(bias) is None:
            continue
        product.op, product.inputs, product.outputs = "biased", (*product.inputs[:2], bias), add.outputs
        program.calls.remove(add)


def rows_from_launches(program: ForwardProgram, bound: Launches) -> None:
    """Of few rows, a launch writes the rows of the product that reads its heads, prepared."""
    for product in [call for call in program.calls if call.op == "product"]:
        prep, flat = product.inputs[1], program.maker(product.inputs[0])
        if not isinstance(prep, OpCall) or prep.op != "head_norm" or flat is None:
            continue
        launch = program.maker(flat.inputs[0])
        if (flat.op, flat.spec) != ("view", ".flatten(1)") or launch is None or launch.op == "view":
            continue
        if not program.read_once(flat.output) or not program.read_once(launch.output):
            continue
        runs = bound.launch(launch.op, launch.spec)
        if fuse.writes_rows_of(runs, bound.weight(product.spec)):
            product.op, product.inputs = "then", (launch, *product.inputs[1:])
            program.calls.remove(flat)
            program.calls.remove(launch)


def weights_ahead(program: ForwardProgram, bound: Launches) -> None:
    """A launch fetches the weights of the product that reads its output."""
    for product in [call for call in program.calls if call.op == "product"]:
        launch = program.maker(product.inputs[0])
        while launch is not None and launch.op in ("view", "hadamard"):
            launch = program.maker(launch.inputs[0])
        if launch is not None and launch.op in FETCH:
            runs = bound.launch(launch.op, launch.spec)
            launch.more |= fuse.read_next(runs, bound.weight(product.spec))


def rows_before_choices(program: ForwardProgram, bound: Launches) -> None:
    """Rows need no choice to be prepared for experts: the router does it, where it norms the same rows, else a launch before it."""
    for moe in [call for call in program.calls if call.op == "moe"]:
        route, experts = program.maker(moe.inputs[3]), bound.loaded(moe)
        if route is None or not experts.readies:
            continue
        x, prep = moe.inputs[:2]
        same = isinstance(prep, OpCall) and (x, prep.inputs[1]) == route.inputs[:2]
        if same and experts.norms and fuse.writes_rows(bound.launch(route.op, route.spec)):
            moe.op, moe.inputs = "moe.routed", (*moe.inputs[:3], route, moe.inputs[4])
            program.calls.remove(route)
            continue
        ready = Value(x.shape)
        before = OpCall("moe.prepare", moe.spec, (x, prep), (ready,), loads=moe.loads)
        program.calls.insert(program.calls.index(route), before)
        moe.inputs = (*moe.inputs[:5], ready)


def misses_before_others(program: ForwardProgram, bound: Launches) -> None:
    """Experts that begin as soon as they are chosen: the choice stands before all of the feed-forward that it does not need."""
    for moe in [call for call in program.calls if call.op == "moe"]:
        route = program.maker(moe.inputs[3])
        if route is None or not bound.loaded(moe).begins:
            continue
        x, prep, _, routes = moe.inputs[:4]
        begun = Value(x.shape)
        given = x, prep, routes, RunInput("row_seq")
        begin = OpCall("moe.begin", moe.spec, given, (begun,), loads=moe.loads)
        program.calls.remove(route)
        for call in (route, begin):
            program.calls.insert(_behind_inputs(program, call), call)
        moe.inputs = (*moe.inputs[:5], begun)


def _behind_inputs(program: ForwardProgram, call: OpCall) -> int:
    """The first place where all that a call reads has been made."""
    makers = (program.maker(value) for value in call.reads())
    return max((program.calls.index(maker) + 1 for maker in makers if maker is not None), default=0)


def shares_into_products(program: ForwardProgram, bound: Launches) -> None:
    """Of few rows, the launch that prepares a product's rows also sums the experts' outputs."""
    for product in [call for call in program.calls if call.op == "product"]:
        moe = program.maker(product.inputs[0])
        if moe is None or moe.op != "moe" or not program.read_once(moe.output):
            continue
        x, prep, stream, routes, shared, ready = moe.inputs
        if ready is None or not (prep is stream is shared is product.inputs[1] is None):
            continue
        if bound.loaded(moe).sums_for(bound.weight(product.spec)):
            given = x, routes, ready, product.spec, product.inputs[2]
            product.op, product.spec, product.loads = "moe.then", moe.spec, moe.loads
            product.inputs = given
            program.calls.remove(moe)


FETCH = ("attend", "mamba2")

EVERYWHERE: tuple[Callable[[ForwardProgram], None], ...] = (
    rows_into_products,
    sums_into_products,
    sums_into_norms,
)
BOUND: tuple[Callable[[ForwardProgram, Launches], None], ...] = (
    keys_beside_products,  # before attention goes into the call behind it
    compressors_together,
    rows_into_groups,
    results_handed_on,
    activations_into_products,
    sums_of_few_rows,
    rows_from_launches,
    rows_before_choices,
    misses_before_others,
    shares_into_products,
    weights_ahead,
)


def plain(program: ForwardProgram) -> ForwardProgram:
    """The program after the rules that hold everywhere."""
    for rule in EVERYWHERE:
        rule(program)
    return program
