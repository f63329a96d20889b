"""The page, in a headless Chromium: as a person uses it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import Browser, chromedriver, until
from router_fakes import World, serving
from server_fakes import FakeEngine, Script
from server_live import Live

from pyspec.request import SlotInfo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromedriver() is None, reason="Chromium and chromedriver are not installed"),
]

ANSWER = """# A title
Some **bold** and *slanted* text with `a < b` and [a link](https://example.org/x).

* first
  * inner
* second

| a | b |
|---|---|
| 1 | 2 |

```python
print("<b>not bold</b>")
```
<img src=x onerror="document.title='broken'"> <script>document.title='broken'</script>
[bad](javascript:document.title='broken')
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine(n_slot=8)
    fake.info = replace(fake.info, memory=(("weights", 3 << 30), ("KV", 1 << 30)))
    yield fake
    fake.close()


@pytest.fixture
def live(serve: Callable[..., Live], browser: Browser) -> Live:
    """A server, and the page open on it without anything from before."""
    started = serve()
    browser.open(started.url)
    browser.run("localStorage.clear()")
    browser.open(started.url)
    browser.complaints()
    return started


def answered(browser: Browser) -> bool:
    return browser.text("#send") == "Send" and bool(browser.text(".turn.assistant .note"))


def ask(browser: Browser, text: str = "hello\n") -> None:
    browser.type("#text", text)


def test_an_answer_is_shown_as_its_markdown_means(browser: Browser, live: Live) -> None:
    live.engine.script = Script(text=ANSWER, width=7)
    ask(browser)
    until(lambda: answered(browser))
    assert browser.text(".assistant h3") == "A title"
    assert browser.text(".assistant strong") == "bold" and browser.text(".assistant em") == "slanted"
    assert browser.text(".assistant p code") == "a < b"
    assert browser.text(".assistant li li") == "inner"
    assert browser.text(".assistant td") == "1"
    assert browser.text(".assistant pre code") == 'print("<b>not bold</b>")'
    links = browser.run("return [...document.querySelectorAll('.assistant a')].map(a => a.href)")
    assert links == ["https://example.org/x"]


def test_what_a_model_writes_never_runs(browser: Browser, live: Live) -> None:
    live.engine.script = Script(text=ANSWER, width=100)
    ask(browser)
    until(lambda: answered(browser))
    assert browser.run("return document.title") == "pyspec"
    assert browser.run("return document.querySelectorAll('#log img, #log script').length") == 0
    assert "<img src=x onerror=" in browser.text(".assistant")
    assert [m for m in browser.complaints() if "favicon" not in m] == []


def test_the_stop_button_frees_the_slot(browser: Browser, live: Live) -> None:
    live.engine.script = Script(text="word " * 80, width=1, round_s=0.05)
    ask(browser)
    until(lambda: "word" in browser.text(".turn.assistant"))
    assert browser.text("#send") == "Stop"
    browser.click("#send")
    until(lambda: live.engine.n_busy == 0)
    until(lambda: browser.text(".turn.assistant .note") == "stopped")
    assert live.engine.cancelled


def test_conversations_outlive_the_page_and_can_be_deleted(browser: Browser, live: Live) -> None:
    ask(browser, "first question\n")
    until(lambda: answered(browser))
    browser.click("#new")
    assert browser.text(".turn") == ""
    ask(browser, "second question\n")
    until(lambda: answered(browser))
    browser.open(live.url)
    titles = "return [...document.querySelectorAll('#chats option')].map(o => o.textContent)"
    assert browser.run(titles)[-2:] == ["second question", "first question"]
    browser.run(
        "const s = document.querySelector('#chats'); s.value = s.options[s.options.length - 1].value;"
        "s.dispatchEvent(new Event('change'))"
    )
    assert browser.text(".turn.user").startswith("first question") and "Hello, world" in browser.text(
        ".turn.assistant"
    )
    browser.click("#delete")
    assert "first question" not in browser.run(titles)


def test_the_whole_conversation_is_sent(browser: Browser, live: Live) -> None:
    ask(browser, "one\n")
    until(lambda: answered(browser))
    ask(browser, "two\n")
    notes = "return [...document.querySelectorAll('.note')].filter(n => n.textContent).length + ''"
    until(lambda: len(browser.run(notes)) and live.engine.n_done == 2)
    prompt = bytes(t for t in live.engine.seen[-1].prompt if t < 256).decode()
    assert "user: one" in prompt and "assistant: Hello, world" in prompt and "user: two" in prompt


def test_eight_busy_slots_are_shown_with_what_they_draft_and_why(browser: Browser, live: Live) -> None:
    engine = live.engine
    n = [0]

    def slots() -> list[SlotInfo]:
        n[0] += 50
        drafting = {"n_draft": 3, "drafted_per_pos": (9, 9, 6), "accepted_per_pos": (9, 6, 1), "draft_n": 24, "draft_n_accepted": 16}  # fmt: skip
        silent = {"n_draft": 0, "draft_reason": "drafts would cost more than they bring"}
        return [
            SlotInfo(
                slot=i,
                n_ctx=512,
                is_processing=True,
                request=f"r{i}",
                state="decode",
                n_past=64 * i,
                n_decoded=n[0],
                speculative=True,
                **(silent if i >= 6 else drafting),
            )
            for i in range(8)
        ]

    engine.slots = slots  # type: ignore[method-assign]
    until(lambda: browser.run("return document.querySelectorAll('#slots tr.decode').length") == 8)
    shown = "return document.querySelector('#slots tr td:nth-child(4)').textContent"
    until(lambda: float(browser.run(shown) or 0) > 0)
    assert (
        browser.run("return document.querySelectorAll('#slots tr:first-child .positions i').length") == 3
    )
    assert "67 %" in browser.text("#slots tr td:nth-child(6)")
    assert browser.text("#why") == "slots 6, 7: no drafts: drafts would cost more than they bring"
    for width in (1200, 390):  # the last column, the gain from speculation, is visible without scrolling
        browser.resize(width, 900)
        until(
            lambda: browser.run(
                "const t = document.querySelector('.scroll'); return t.scrollWidth <= t.clientWidth"
            )
        )
    browser.resize(1200, 900)
    assert "weights 3.00 GiB" in browser.text("#memory") and "4.00 GiB in all" in browser.text("#memory")


def test_the_page_says_that_the_engine_is_being_replaced_and_goes_on(
    browser: Browser, live: Live
) -> None:
    live.engine.state = lambda: "recovering"  # type: ignore[method-assign]
    until(lambda: browser.text("#state") == "recovering")
    live.engine.state = lambda: "ok"  # type: ignore[method-assign]
    until(lambda: browser.text("#state") == "ok")
    ask(browser)
    until(lambda: answered(browser))


def test_a_phone_shows_everything_without_scrolling_sideways(
    browser: Browser, live: Live, tmp_path: Path
) -> None:
    live.engine.script = Script(text=ANSWER + "\n```\n" + "long " * 100 + "\n```\n", width=500)
    browser.resize(390, 800)
    try:
        ask(browser)
        until(lambda: answered(browser))
        assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
        browser.screenshot(tmp_path / "phone.png")
    finally:
        browser.resize(1200, 900)


def test_refusals_are_told_in_the_conversation(browser: Browser, live: Live) -> None:
    live.engine.is_alive = False
    ask(browser)
    until(lambda: "not ready" in browser.text(".turn.assistant .note"))
    live.engine.is_alive = True


def test_tokens_are_coloured_by_whether_they_were_drafted(browser: Browser, live: Live) -> None:
    ask(browser)
    until(lambda: answered(browser))
    browser.click("#colour")
    spans = browser.run(
        "return [...document.querySelectorAll('.assistant.tokens span')].map(s => s.textContent).join('')"
    )
    browser.click("#colour")
    assert spans == "Hello, world"


def sent(live: Live) -> str:
    """The last prompt that the engine was given."""
    return bytes(t for t in live.engine.seen[-1].prompt if t < 256).decode()


def fill(browser: Browser, field: str, value: str) -> None:
    browser.run(
        f"const f = document.querySelector('{field}'); f.value = {json.dumps(value)}; f.dispatchEvent(new Event('input', {{bubbles: true}}))"
    )


def press(browser: Browser, name: str, turn: str) -> None:
    """A button of a turn, by its words."""
    script = f"return [...document.querySelectorAll('{turn} .actions button')].find(b => b.textContent === '{name}')?.click() ?? true"
    assert browser.run(script)


def test_a_system_prompt_and_sampling_are_sent_and_outlive_the_page(
    browser: Browser, live: Live
) -> None:
    fill(browser, "#system", "You are a pirate.")
    fill(browser, "#temperature", "0.35")
    fill(browser, "#seed", "17")
    fill(browser, "#max_tokens", "5")
    ask(browser)
    until(lambda: answered(browser))
    request = live.engine.seen[-1]
    assert sent(live).startswith("system: You are a pirate.\nuser: hello")
    assert (request.params.temperature, request.params.seed, request.max_tokens) == (0.35, 17, 5)
    assert request.params.top_k == 40, "what is left empty is the server's"
    browser.open(live.url)
    assert browser.run("return document.querySelector('#system').value") == "You are a pirate."
    assert browser.text("#set") == "system prompt, temperature 0.35, max_tokens 5, seed 17"
    browser.run("document.querySelector('#settings').open = true")
    browser.click("#defaults")
    ask(browser, "again\n")
    until(lambda: live.engine.n_done == 2)
    assert (
        "pirate" not in sent(live)
        and live.engine.seen[-1].params.temperature == 0.8
        and browser.text("#set") == ""
    )


def test_empty_settings_show_what_the_server_has(browser: Browser, live: Live) -> None:
    until(lambda: browser.run("return document.querySelector('#temperature').placeholder") == "0.8")
    assert browser.run("return ['top_k', 'seed', 'max_tokens'].map(n => document.getElementById(n).placeholder)") == ["40", "any", "no limit"]  # fmt: skip


def test_a_message_is_changed_and_what_follows_it_is_asked_again(browser: Browser, live: Live) -> None:
    for text in ("one\n", "two\n"):
        ask(browser, text)
        until(
            lambda: (
                answered(browser)
                and browser.run("return document.querySelectorAll('.actions').length") % 2 == 0
            )
        )
    until(lambda: live.engine.n_done == 2 and answered(browser))
    press(browser, "Edit", ".turn:nth-child(1)")
    assert browser.run("return document.querySelector('.edited textarea').value") == "one"
    browser.run("document.querySelector('.edited textarea').value = 'uno'")
    press(browser, "Cancel", ".turn:nth-child(1)")
    assert browser.run("return document.querySelectorAll('.turn').length") == 4
    press(browser, "Edit", ".turn:nth-child(1)")
    browser.run("document.querySelector('.edited textarea').value = 'eins'")
    press(browser, "Send", ".turn:nth-child(1)")
    until(lambda: live.engine.n_done == 3 and answered(browser))
    assert "user: eins" in sent(live) and "one" not in sent(live) and "two" not in sent(live)
    assert browser.run("return document.querySelectorAll('.turn').length") == 2


def test_an_answer_is_regenerated_and_takes_the_place_of_the_last(browser: Browser, live: Live) -> None:
    ask(browser, "one\n")
    until(lambda: answered(browser))
    live.engine.script = Script(text="Another answer")
    press(browser, "Regenerate", ".turn.assistant")
    until(lambda: "Another answer" in browser.text(".turn.assistant") and answered(browser))
    assert browser.run("return document.querySelectorAll('.turn').length") == 2
    assert "Hello" not in sent(live), "the answer that goes is no part of the question"


def test_line_breaks_stay(browser: Browser, live: Live) -> None:
    live.engine.script = Script(
        text="Roses are red,\nviolets are blue.\n\n* a\n  b\n\n> c\n> d", width=100
    )
    ask(browser)
    until(lambda: answered(browser))
    for at, lines in (
        ("p", "Roses are red,\nviolets are blue."),
        ("li", "a\nb"),
        ("blockquote p", "c\nd"),
    ):
        assert browser.run(f"return document.querySelector('.assistant {at}').innerText") == lines


def test_a_conversation_is_saved_as_text(browser: Browser, live: Live) -> None:
    live.engine.script = Script(text="An **answer**.", width=100)
    ask(browser, "why? / because\n")
    until(lambda: answered(browser))
    browser.run(
        "window.kept = []; const made = URL.createObjectURL;"
        "URL.createObjectURL = blob => { blob.text().then(text => window.kept.push(text)); return made(blob); };"
        "HTMLAnchorElement.prototype.click = function () { window.kept.push(this.download); };"
    )
    browser.click("#save")
    until(lambda: browser.run("return window.kept.length") == 2)
    name, text = browser.run("return window.kept")
    assert (name, text) == (
        "why_ _ because.md",
        "## user\n\nwhy? / because\n\n## assistant\n\nAn **answer**.\n",
    )
    assert not browser.complaints()


def test_an_answer_is_copied_as_it_was_written(browser: Browser, live: Live) -> None:
    live.engine.script = Script(text="**bold** and\n\n- a list", width=100)
    ask(browser)
    until(lambda: answered(browser))
    browser.run(
        "window.kept = ''; navigator.clipboard.writeText = async text => { window.kept = text; }"
    )
    press(browser, "Copy", ".turn.assistant")
    until(lambda: browser.run("return window.kept") == "**bold** and\n\n- a list")
    until(lambda: browser.text(".turn.assistant .actions button") == "Copied")


def test_nothing_can_be_changed_while_an_answer_is_under_way(browser: Browser, live: Live) -> None:
    live.engine.script = Script(text="word " * 80, width=1, round_s=0.05)
    ask(browser)
    until(lambda: "word" in browser.text(".turn.assistant"))
    assert browser.run("return document.querySelectorAll('.actions').length") == 0
    browser.click("#send")
    until(lambda: browser.run("return document.querySelectorAll('.actions').length") == 2)


def test_the_colours_of_drafts_have_a_key(browser: Browser, live: Live) -> None:
    seen = "const k = document.querySelector('#legend'); return k.offsetParent !== null && k.textContent"
    assert browser.run(seen) is False
    browser.click("#colour")
    assert browser.run(seen) == "accepted draft the model's own token"
    ask(browser)
    until(lambda: answered(browser))
    colour = "return getComputedStyle(document.querySelector('{}')).backgroundColor"
    kinds = {"own": ".tokens .own", "drafted": ".tokens .drafted"}
    shown = [k for k, at in kinds.items() if browser.run(f"return !!document.querySelector('{at}')")]
    assert shown
    for kind in shown:
        assert browser.run(colour.format(kinds[kind])) == browser.run(colour.format(f"#legend .{kind}"))
    browser.click("#colour")
    assert browser.run(seen) is False


def test_the_last_conversation_is_there_after_a_reload(browser: Browser, live: Live) -> None:
    ask(browser, "first question\n")
    until(lambda: answered(browser))
    browser.click("#new")
    ask(browser, "second question\n")
    until(lambda: live.engine.n_done == 2 and answered(browser))
    browser.open(live.url)
    assert browser.text(".turn.user").startswith("second question")
    browser.run(
        "const s = document.querySelector('#chats'); s.value = s.options[s.options.length - 1].value;"
        "s.dispatchEvent(new Event('change'))"
    )
    browser.open(live.url)
    assert browser.text(".turn.user").startswith("first question")
    assert (
        browser.run(
            "const s = document.querySelector('#chats'); return s.selectedOptions[0].textContent"
        )
        == "first question"
    )


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
        ("***\n* * *\n_____", "<hr><hr><hr>"),
        ("- a\n---\n- b", "<ul><li>a</li></ul><hr><ul><li>b</li></ul>"),
        ("Title\n===\ntext", "<h3>Title</h3><p>text</p>"),
        ("Title\n---\ntext", "<h4>Title</h4><p>text</p>"),
        ("a ~~b **c**~~ d", "<p>a <del>b <strong>c</strong></del> d</p>"),
        ("~~ a ~~ and ~b~ and ~~c", "<p>~~ a ~~ and ~b~ and ~~c</p>"),
        ("`~~a~~`", "<p><code>~~a~~</code></p>"),
        ("a -- b\n--", "<h4>a -- b</h4>"),
    ],
)
def test_markdown(browser: Browser, live: Live, text: str, shape: str) -> None:
    found = browser.run(
        f"const d = document.createElement('div'); d.append(markdown({json.dumps(text)})); return d.innerHTML"
    )
    assert found == shape


def test_the_model_is_chosen_among_several(browser: Browser) -> None:
    with serving(World({"one": 1, "two": 1}, load_s=0.3)) as several:
        browser.open(several.url)
        browser.run("localStorage.clear()")
        browser.open(several.url)
        until(lambda: "two (unloaded)" in browser.text("#models"))
        browser.run(
            "const s = document.getElementById('models'); s.value = 'two'; s.dispatchEvent(new Event('change'))"
        )
        ask(browser)
        until(lambda: answered(browser))
        assert "I am two" in browser.text(".turn.assistant")
        until(lambda: "unloaded" in browser.text("#models") and "two (" not in browser.text("#models"))
    with serving(World({"one": 1}), alone=True) as single:
        browser.open(single.url)
        until(lambda: browser.text("#state") == "ok")
