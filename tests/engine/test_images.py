"""Requests with pictures: the texts of llama.cpp with every drafter, in any slot and beside any others; encoded once, beside rounds; and faults
that end one request."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine_rig import FIXTURES, GREEDY, Heard, Rig, rig
from picture_drafters import TAPPED, drafter_for, guided
from seen import IMAGES, MODELS, N_TOKEN, PROMPTS, Seen, look, picture, seeing, seen, watched
from torch import Tensor

from pyspec.device.worker import Launched
from pyspec.engine.loop.pictures import Pictures
from pyspec.engine.loop.round import RowLimits, plan_work
from pyspec.engine.policy.affinity import chain_of
from pyspec.engine.validate import Validator
from pyspec.errors import RequestError, SlotError
from pyspec.request import PromptLogprobs, Request, SamplingParams
from pyspec.slots.images import IMAGE, is_image
from pyspec.slots.round import Round
from pyspec.vision.picture import Placed

LONG = 60  # tokens, in which a tiny model repeats itself
DRAFTERS: dict[str, dict[str, object]] = {
    "none": {},
    "ngram": {"spec_type": "ngram", "n_draft_fixed": True},
    "suffix": {"spec_type": "suffix"},
    "itself": {"spec_type": "draft", "n_draft_fixed": True},
    "mtp": {"spec_type": "mtp", "n_draft_fixed": True},
    "dflash": {"spec_type": "dflash", "n_draft_fixed": True},
    "eagle3": {"spec_type": "eagle3", "n_draft_fixed": True},
}


def drafting(name: str, drafter: str, **settings: object) -> Rig:
    own, target = {}, IMAGES / f"{name}.gguf"
    if drafter == "itself" or drafter in TAPPED:
        own = {"draft_path": target if drafter == "itself" else drafter_for(target, drafter)}
    return seeing(name, **{**DRAFTERS[drafter.split("-")[0]], **own, **settings})


def is_right(heard: Heard, s: Seen) -> bool:
    return heard.error is None and heard.tokens == s.tokens


# -- texts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_slot", [1, 7])
@pytest.mark.parametrize(
    ("name", "drafter"),
    [(m, d) for m in MODELS for d in DRAFTERS if d != "mtp" or m == "qwen35"],
)
def test_texts_are_those_of_llama_cpp_with_every_drafter(name: str, drafter: str, n_slot: int) -> None:
    r = drafting(name, drafter, np=n_slot)
    encoder, text = watched(r), seen(name, "late").text
    want = rig(IMAGES / f"{name}.gguf", spec_type="none").generate(text, LONG).tokens
    for n_have in (0, 1):  # nothing in the cache, and all of it
        heard = [(look(r, seen(name, p)), seen(name, p)) for p in PROMPTS]
        beside = [r.submit(text, LONG) for _ in range(2)]
        r.run()
        assert [is_right(*each) for each in heard] == [True] * len(PROMPTS)
        assert all(h.tokens == want for h in beside)
        assert n_have == 0 or any(h.timings.cache_n > s.first.first for h, s in heard)
    assert len(encoder.pictures) == len({p.digest for p in encoder.pictures}) == 4
    assert not r.loop.worker.shown, "rows stay on the device until they are computed, and no longer"
    assert r.loop.stats.guard_trips == 0 and not r.loop.speculator.lost_track


@pytest.mark.parametrize(
    ("name", "drafter"),
    [("qwen35", "mtp"), ("qwen35", "itself"), ("mistral3", "ngram"), ("gemma3", "suffix")],
)
def test_drafts_behind_pictures_are_verified_and_change_no_text(name: str, drafter: str) -> None:
    plain, r = seeing(name), drafting(name, drafter, np=3)
    want = [look(plain, seen(name, p), LONG) for p in PROMPTS]
    plain.run()
    found = [look(r, seen(name, p), LONG) for p in PROMPTS]
    r.run()
    assert [h.tokens for h in found] == [h.tokens for h in want]
    if drafter in ("mtp", "itself"):
        assert sum(h.timings.draft_n for h in found) > LONG
    if drafter == "itself":  # it sees placeholders, and the text behind the picture
        assert sum(h.timings.draft_n_accepted for h in found) > 0


@pytest.mark.parametrize(
    ("name", "drafter", "n_slot"),
    [
        *(("qwen35", drafter, n) for drafter in ("dflash", "eagle3") for n in (1, 7)),
        ("gemma3", "dflash", 7),
        ("gemma4-e", "eagle3", 1),
        ("mistral3", "eagle3-own", 7),
    ],
)
def test_drafters_of_layers_draft_behind_pictures_as_they_do_alone(
    name: str, drafter: str, n_slot: int
) -> None:
    """Some drafts are right. Behind the same tokens a drafter drafts the same, whichever pieces the prompt came in and whatever is beside it."""
    plain, text = seeing(name), seen(name, "late").text
    want = [look(plain, seen(name, p), LONG) for p in PROMPTS]
    beside = plain.submit(text, LONG)
    plain.run()
    known = [[*seen(name, p).text, *h.tokens] for p, h in zip(PROMPTS, want, strict=True)]
    drafts: list[dict[tuple[int, ...], list[int]]] = []
    for settings in ({"np": n_slot}, {"np": n_slot, "prefix_cache": False}, {"np": 2, "ubatch": 9, "prefix_cache": False}):  # fmt: skip
        r = drafting(name, drafter, **settings)
        drafts.append(guided(r.loop.drafter, [*known, [*text, *beside.tokens]]))
        for _ in range(2):  # the second time from the cache, where there is one
            found = [look(r, seen(name, p), LONG) for p in PROMPTS]
            texts = [r.submit(text, LONG) for _ in range(2)]
            r.run()
            assert [h.tokens for h in found] == [h.tokens for h in want]
            assert all(h.tokens == beside.tokens for h in texts)
            assert all(0 < h.timings.draft_n_accepted < h.timings.draft_n for h in found)
        assert not r.loop.speculator.lost_track and not r.loop.worker.shown
    one, other = drafts[1:]
    assert len(both := one.keys() & other.keys()) > LONG
    assert [one[key] for key in both] == [other[key] for key in both]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [9, 21])
def test_prompts_in_pieces_cut_no_picture_that_is_seen_both_ways(name: str, rows: int) -> None:
    r = seeing(name, np=3, batch=rows, ubatch=rows)
    widths: list[int] = []
    launch = r.loop.worker.launch

    def watch(round_: object) -> object:
        for seq in round_.seqs:  # type: ignore[attr-defined]
            end = seq.n_past + seq.width
            widths.append(seq.width)
            if r.loop.pictures.are_whole:
                assert not any(i.first < at < i.end for i in seq.images for at in (seq.n_past, end))
        assert round_.n_row <= r.loop.limits.prompts  # type: ignore[attr-defined]
        return launch(round_)  # type: ignore[arg-type]

    r.loop.worker.launch = watch  # type: ignore[method-assign, assignment]
    heard = [(look(r, seen(name, p)), seen(name, p)) for p in PROMPTS]
    r.run()
    assert [is_right(*each) for each in heard] == [True] * len(PROMPTS)
    assert r.loop.pictures.are_whole is (name[:5] == "gemma")
    assert (
        max(widths) > rows or rows > 16 if r.loop.pictures.are_whole else max(widths) <= rows + rows // 4
    )


@pytest.mark.parametrize("name", ["qwen35", "gemma4"])
def test_rounds_without_pictures_run_ahead_beside_requests_that_have_read_theirs(name: str) -> None:
    r = seeing(name, np=2)
    r.run_ahead(defers=True)
    ahead: list[bool] = []
    r.watch_reads(ahead)
    heard = [(look(r, seen(name, p)), seen(name, p)) for p in PROMPTS]
    r.run()
    assert [is_right(*each) for each in heard] == [True] * len(PROMPTS)
    assert any(ahead)


def test_a_picture_may_be_first_last_and_all_of_a_prompt() -> None:
    name = "mistral3"
    s, own = seen(name, "one"), picture(name, "grey.png")
    r = seeing(name, np=7)
    last = Seen((*s.text[:4], *[IMAGE] * own.n_row), (Placed(own, 4),), [])
    alone = Seen((IMAGE,) * own.n_row, (Placed(own, 0),), [])
    twice = Seen((IMAGE,) * (2 * own.n_row), (Placed(own, 0), Placed(own, own.n_row)), [])
    heard = {n: [look(r, each, 9) for _ in range(2)] for n, each in enumerate((last, alone, twice))}
    beside = look(r, s)
    r.run()
    assert is_right(beside, s)
    assert all(a.tokens == b.tokens and len(a.tokens) == 9 for a, b in heard.values())
    assert len({tuple(pair[0].tokens) for pair in heard.values()}) == 3
    r.loop.table.clear()  # and in pieces, with the cache
    for n, each in enumerate((last, alone, twice)):
        assert look_at(r, each, 9).tokens == heard[n][0].tokens


def look_at(r: Rig, s: Seen, n: int = N_TOKEN, **request: object) -> Heard:
    heard = look(r, s, n, **request)
    r.run()
    return heard


# -- encoding -------------------------------------------------------------------------------------------------------


def test_others_go_on_and_pass_while_a_picture_is_encoded() -> None:
    r = seeing("qwen35", np=2)
    encoder, s = watched(r), seen("qwen35", "two")
    running = r.submit(s.text, 30)
    r.loop.step()
    seeing_ = look(r, s)
    later = r.submit(s.text[2:], 5)
    gaps = []
    while not seeing_.events:
        before = encoder.n_slice
        n = len(running.tokens) + len(later.tokens)
        r.loop.step()
        gaps.append(encoder.n_slice - before)
        assert len(running.tokens) + len(later.tokens) > n or running.over, (
            "each slice is beside a round"
        )
    assert later.tokens, "a request without pictures passes"
    assert max(gaps) == 1 and sum(gaps) == encoder.n_slice >= 4
    r.run()
    assert is_right(seeing_, s) and not running.error


@pytest.mark.parametrize("slice_s", [0.0, 1e9])
def test_a_large_picture_holds_no_round_up_for_a_whole_block(
    slice_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyspec.vision.encoder.PIECE", 31)
    r, s = seeing("qwen35", np=2), seen("qwen35", "late")
    assert 0.01 < r.loop.pictures.slice_s < 0.4, "a prompt's rows may take 0.4 s"
    r.loop.pictures.slice_s = slice_s
    beside = r.submit(s.text, 200)
    r.loop.step()
    heard, n = look(r, s), 0
    while not heard.events:
        told = len(beside.tokens)
        r.loop.step()
        n += len(beside.tokens) > told
    n_patch = s.first.picture.pixels.size // 3 // 4**2
    assert n <= 2 if slice_s else n >= 2 * 2 * (n_patch // 31)
    r.run()
    assert is_right(heard, s)


class NoStream:
    """Stands for a stream of a GPU, which asks for no device"""

    def __init__(self, *_: object) -> None: ...
    def wait_stream(self, other: object) -> None: ...
    def synchronize(self) -> None: ...


@pytest.fixture(params=["cpu", "cuda"])
def threaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A rig whose encoder has the thread that it has beside a GPU, and on one: "cuda" says that it is there, and computes on the CPU."""
    r = seeing("qwen35", np=2)
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: NoStream())
    beside = SimpleNamespace(device=torch.device("cuda"))
    old, device = r.loop.pictures, torch.device(request.param)
    new = Pictures(beside, old.encoder, device)  # type: ignore[arg-type]
    new.warm_up()
    new.worker, r.loop.pictures, r.loop.admission.pictures = old.worker, new, new
    return r


def test_an_encoder_beside_a_gpu_or_on_one_has_a_thread(threaded: Rig) -> None:
    r, s, other = threaded, seen("qwen35", "two"), seen("qwen35", "one")
    encoder, here = watched(r), threading.get_ident()
    threads: set[int] = set()
    encoder.before = lambda: threads.add(threading.get_ident())
    heard = [(look(r, each), each) for each in (s, other)]
    while not all(h.over for h, _ in heard):
        r.loop.step()
    assert all(is_right(*each) for each in heard) and len(threads - {here}) == 1 == len(threads)
    encoder.fails = RuntimeError("out of luck")
    lost = look(r, seen("qwen35", "side"))
    while not lost.over:
        r.loop.step()
    assert "out of luck" in str(lost.error)


def test_rounds_go_on_while_a_library_plans_for_a_new_size(threaded: Rig) -> None:
    """As cuDNN's attention does, for longer than many rounds."""
    r, s = threaded, seen("qwen35", "late")
    encoder, planned, began = watched(r), threading.Event(), threading.Event()

    def plan() -> None:
        began.set()
        assert planned.wait(60)

    encoder.before = plan
    beside = r.submit(s.text, 90)
    r.loop.step()
    heard, n = look(r, s), len(beside.tokens)
    while len(beside.tokens) < n + 40:
        r.loop.step()
    assert began.is_set() and encoder.n_slice == 1 and not heard.events
    planned.set()
    while not heard.over:
        r.loop.step()
    assert is_right(heard, s)


def test_a_thread_is_waited_for_before_weights_go(threaded: Rig) -> None:
    r, s = threaded, seen("qwen35", "one")
    encoder, began, ended = watched(r), threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        time.sleep(0.3)
        ended.set()

    encoder.before = slow
    gone = look(r, s)
    r.loop.step()
    assert began.wait(60)
    r.loop.cancel(gone.job)
    r.loop.step()
    assert not ended.is_set() and not r.loop.pictures.is_busy
    r.loop.leave()
    assert ended.is_set()


def test_the_first_reader_takes_the_last_rows_where_they_were_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Later ones, and one behind a park, take those of the host."""
    gpu, host, shown, streams = (
        torch.device("cuda", 0),
        torch.zeros(2, 3),
        list[object](),
        list[object](),
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    worker = SimpleNamespace(device=gpu, show=lambda _, rows: shown.append(rows))
    pictures = Pictures(worker, None)  # type: ignore[arg-type]
    made = SimpleNamespace(is_cuda=True, device=gpu, record_stream=streams.append)
    of = SimpleNamespace(images=[SimpleNamespace(handle=5)])
    work = SimpleNamespace(seq=of, job=SimpleNamespace(rows={5: host}))
    pictures._keep(5, host, made)  # type: ignore[arg-type]
    for _ in range(2):
        pictures.bring([work])  # type: ignore[list-item]
    pictures._keep(5, host, made)  # type: ignore[arg-type]
    pictures.rest()
    pictures.bring([work])  # type: ignore[list-item]
    assert [x is made for x in shown] == [True, False, False] and streams == ["stream of cuda:0"]


def test_requests_of_one_picture_encode_it_once_and_a_kept_one_not_at_all() -> None:
    r = seeing("mistral3", np=3)
    encoder, s = watched(r), seen("mistral3", "one")
    heard = [look(r, s) for _ in range(5)]
    r.run()
    assert all(is_right(h, s) for h in heard) and len(encoder.pictures) == 1
    r.loop.table.clear()
    heard = [
        look(
            r,
            replace(
                s, prompt=(5, *s.prompt), images=tuple(replace(i, first=i.first + 1) for i in s.images)
            ),
        )
    ]
    r.run()
    assert not heard[0].error and heard[0].timings.cache_n == 0
    assert len(encoder.pictures) == 1, "its rows were kept for another beginning"


def test_rows_are_kept_within_a_bound() -> None:
    r = seeing("mistral3")
    encoder, s = watched(r), seen("mistral3", "two")
    r.loop.pictures.most_bytes = 1
    for _ in range(2):
        assert is_right(look_at(r, s), s)
        r.loop.table.clear()
    assert len(encoder.pictures) == 3 and len(r.loop.pictures._kept) == 1, "the last one is kept"


def test_a_device_has_only_the_pictures_of_its_rounds() -> None:
    r = seeing("mistral3", np=3, batch=9, ubatch=9)
    worker, shown, launch = r.loop.worker, list[set[int]](), r.loop.worker.launch

    def watch(round_: Round) -> Launched:
        shown.append({*worker.shown})
        assert {image.handle for seq in round_.seqs for image in seq.images} <= shown[-1]
        return launch(round_)

    worker.launch = watch  # type: ignore[method-assign]
    heard = [(look(r, seen("mistral3", p)), seen("mistral3", p)) for p in ("two", "side")]
    r.run()
    assert all(is_right(*each) for each in heard) and not worker.shown
    assert not any(h.job.rows for h, _ in heard)
    assert len(set.union(*shown)) > max(map(len, shown)) > 0


def test_a_picture_for_which_a_device_has_no_memory_ends_its_request() -> None:
    r, s, other = seeing("gemma3", np=3), seen("gemma3", "one"), seen("gemma3", "late")
    show = r.loop.worker.show

    def full(handle: int, rows: Tensor) -> None:
        if r.loop.table.handles.digest(handle) == s.first.picture.digest:
            raise torch.OutOfMemoryError("out of memory")
        show(handle, rows)

    r.loop.worker.show = full  # type: ignore[method-assign]
    lost, stays, text = look(r, s), look(r, other), r.submit(other.text, 20)
    r.run()
    assert "out of memory" in str(lost.error) and isinstance(lost.error, SlotError)
    assert is_right(stays, other) and not text.error
    r.loop.worker.show = show  # type: ignore[method-assign]
    assert is_right(look_at(r, s), s)


def test_a_request_is_cancelled_while_its_picture_is_encoded() -> None:
    r = seeing("qwen35")
    encoder, s, other = watched(r), seen("qwen35", "one"), seen("qwen35", "side")
    gone, stays = look(r, s), look(r, other)
    r.loop.step()
    assert encoder.n_slice == 1
    r.loop.cancel(gone.job)
    r.run()
    assert gone.finish == "cancelled" and not gone.tokens and is_right(stays, other)
    assert not r.loop.pictures.is_busy
    assert is_right(look_at(r, s), s)


def test_an_encoder_that_fails_ends_the_requests_of_its_picture() -> None:
    r = seeing("gemma3", np=3)
    encoder, s, other = watched(r), seen("gemma3", "one"), seen("gemma3", "two")
    encoder.fails = RuntimeError("out of luck")
    running = r.submit(other.text, 30)
    lost = [look(r, s) for _ in range(2)]
    while not all(h.over for h in lost):
        r.loop.step()
    assert all(isinstance(h.error, SlotError) and "out of luck" in str(h.error) for h in lost)
    encoder.fails = None
    again = [look(r, s), look(r, other)]
    r.run()
    assert is_right(again[0], s) and is_right(again[1], other) and not running.error


# -- other readers of ids -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {"repeat_penalty": 1.3, "repeat_last_n": -1},
        {"dry_multiplier": 0.8, "dry_base": 1.1, "dry_sequence_breakers": ()},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 0.9, "seed": 7, "adaptive_target": 0.6},
        {"temperature": 1.0, "seed": 3, "top_k": 9, "logprobs": 2},
    ],
)
def test_samplers_know_text_alone_and_drafts_change_nothing(params: dict[str, object]) -> None:
    name = "qwen35"
    p = replace(GREEDY, **params)  # type: ignore[arg-type]
    plain, r = seeing(name), drafting(name, "mtp", np=2)
    s = seen(name, "two")
    want = plain.submit(s.prompt, 30, p, images=s.images)
    plain.run()
    found = [r.submit(s.prompt, 30, p, images=s.images) for _ in range(2)]
    r.run()
    assert len(want.tokens) == 30 and all(h.tokens == want.tokens for h in found)
    assert not any(map(is_image, want.job.sampler.history))


def test_rows_of_pictures_have_no_log_probability() -> None:
    s = seen("mistral3", "side")
    r = seeing("mistral3", batch=16, ubatch=16)
    heard = look_at(r, s, prompt_logprobs=2)
    told = [e for e in heard.events if isinstance(e, PromptLogprobs)]
    entries = [entry for e in told for entry in e.entries]
    assert is_right(heard, s) and len(entries) == len(s.prompt) - 1
    for entry, token in zip(entries, s.prompt[1:], strict=True):
        assert entry.token == token and (entry.logprob != entry.logprob) is is_image(token)
        assert (len(entry.top) == 2) is not is_image(token)
    assert {
        rank == 0
        for e in told
        for entry, rank in zip(e.entries, e.ranks, strict=True)
        if is_image(entry.token)
    } == {True}


def test_a_seed_draws_the_same_whatever_handle_a_picture_has() -> None:
    s, params = seen("mistral3", "one"), SamplingParams(temperature=1.0, seed=11, ignore_eos=True)
    r, other = seeing("mistral3"), seeing("mistral3")
    look_at(other, seen("mistral3", "two"), 1)
    texts = []
    for each in (r, other):
        heard = each.submit(s.prompt, 20, params, images=s.images)
        each.run()
        texts.append(heard.tokens)
    assert texts[0] == texts[1]


def test_other_pictures_have_other_keys_for_replicas() -> None:
    one, two = (picture("qwen35", f) for f in ("odd.png", "wide.jpg"))
    ids = (1, 2, *[IMAGE] * 90, *range(9))
    chains = [
        chain_of(Request(prompt=ids, images=(Placed(replace(each, n_row=90), 2),)))
        for each in (one, one, two)
    ]
    assert chains[0] == chains[1] and not {*chains[0]} & {*chains[2]} and len(chains[0]) == 3


def test_plans_of_rows_hold_whole_pictures() -> None:
    """One picture that does not fit beside others has a forward of its own, and the others wait."""
    r = seeing("gemma3", np=3)
    s = seen("gemma3", "side")
    encoder = watched(r)
    heard = [look(r, s) for _ in range(3)]
    while len(r.loop.jobs) < 3:
        r.loop.admit()
        r.loop.pictures.step(is_alone=True)
    jobs = list(r.loop.jobs.values())
    most = 20  # a picture has 16
    limits = RowLimits(decoding=5, prompts=most)
    for _ in range(30):
        work = plan_work([j for j in jobs if j.slot is not None and j.todo[0]], {}, limits)
        if not work:
            break
        assert sum(w.seq.width for w in work) <= most + most // 4
        for w in work:
            end = w.seq.n_past + w.seq.width
            assert not any(i.first < at < i.end for i in w.job.images for at in (w.seq.n_past, end))
            w.slot.tokens.extend(w.seq.tokens)
    assert all(not j.todo[0] for j in jobs) and encoder.pictures and all(not h.over for h in heard)


# -- refusals -------------------------------------------------------------------------------------------------------


def refusal(r: Rig, s: Seen, **changes: object) -> str:
    validator = Validator(r.info, r.tokenizer)
    request = Request(prompt=s.prompt, images=s.images)
    assert validator.check(request).images == s.images if r.info.sees else True
    with pytest.raises(RequestError) as e:
        validator.check(replace(request, **changes))  # type: ignore[arg-type]
    return str(e.value)


def test_pictures_that_do_not_fit_their_prompt_are_refused() -> None:
    s, r = seen("qwen35", "side"), seeing("qwen35")
    first, second = s.images
    at = first.first

    def text(prompt: Sequence[int]) -> str:
        return refusal(r, s, prompt=tuple(prompt))

    assert "want places in order" in refusal(r, s, images=(second, first))
    assert "want places in order" in refusal(r, s, images=(first, replace(first, first=at + 3)))
    assert "want places in order" in refusal(
        r, s, images=(first, replace(second, first=len(s.prompt) - 2))
    )
    assert "other ids" in refusal(r, s, images=(replace(first, first=at - 1), second))
    assert "prompt token 4294967296" in refusal(r, s, images=(first,))
    assert "other ids" in text([*s.prompt[:at], 5, *s.prompt[at + 1 :]])
    assert "other ids" in text([*s.prompt[:at], IMAGE + 1, *s.prompt[at + 1 :]])
    assert "is -1" not in text([-1, *s.prompt[1:]]) and "prompt token -1" in text([-1, *s.prompt[1:]])


def test_a_model_without_a_projector_refuses_pictures() -> None:
    s, r = seen("qwen35", "one"), rig(IMAGES / "qwen35.gguf")
    assert refusal(r, s, max_tokens=3) == "this model was loaded without --mmproj"
    assert not r.info.sees


def test_plans_count_the_projector_and_rows_of_whole_pictures() -> None:
    plain, r = (
        rig(IMAGES / "gemma3.gguf", spec_type="none", np=3),
        seeing("gemma3", np=3, batch=7, ubatch=5),
    )
    assert dict(r.info.memory)["projector"] > 0 and "projector" not in dict(plain.info.memory)
    assert r.loop.limits.prompts == 16 + 3 and r.loop.limits.decoding == 5
    assert r.loop.memory.n_chunk >= 16 + 3, "rings hold the rows of such a forward"
    assert r.info.sees and r.info.mmproj.endswith("mmproj-gemma3.gguf")


def test_rows_stay_f32_and_of_the_model_s_width() -> None:
    r = seeing("qwen35")
    look_at(r, seen("qwen35", "one"), 1)
    (rows,) = r.loop.pictures._kept.values()
    assert (
        rows.dtype == torch.float32 and rows.shape == (30, r.info.n_embd) and rows.device.type == "cpu"
    )
    assert (FIXTURES / "images").is_dir()
