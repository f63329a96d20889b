"""The demo's own checks: it must not end well when texts differ, drafts appear where none may, or none appear at all."""

from __future__ import annotations

import pytest

from pyspec.cli import demo
from pyspec.cli.chats import DemoBatch, DemoChat
from pyspec.errors import PyspecError


def chat(text: str = "same", n_drafted: int = 0, **values: object) -> DemoChat:
    return DemoChat("q", text, "stop", 4, n_drafted=n_drafted, **values)


def test_a_differing_text_is_an_error_with_its_place():
    with pytest.raises(PyspecError, match="the plain answer differs from character 2 on"):
        demo._check_same([chat("saved")], {"q": "same"}, False)
    with pytest.raises(PyspecError, match="the speculative answer differs from character 4 on"):
        demo._check_same([chat("same and more")], {"q": "same"}, True)


def test_drafts_in_a_plain_turn_are_an_error():
    with pytest.raises(PyspecError, match="speculation was off, but 3 tokens"):
        demo._check_same([chat(n_drafted=3)], {"q": "same"}, False)
    demo._check_same([chat(n_drafted=0)], {"q": "same"}, True)


def test_a_demo_without_a_single_draft_is_an_error():
    with pytest.raises(PyspecError, match="no chat drafted"):
        demo._race(0, ["q"], 1, DemoBatch([chat(), chat()], 1.0))


def test_a_chat_that_failed_or_was_cut_is_an_error():
    assert DemoBatch([chat(), chat()], 1.0).error == ""
    assert "ended with 'length'" in DemoBatch([chat(), DemoChat("q", "x", "length", 4)], 1.0).error
    assert "refused" in DemoBatch([chat(error="refused")], 1.0).error


def test_a_rate_is_of_all_streams_together():
    assert DemoBatch([chat(), chat()], 0.5).rate == 16.0


def test_ratios_are_taken_turn_by_turn():
    assert demo.Race("x", [100.0, 50.0], [200.0, 150.0]).ratios == [2.0, 3.0]
