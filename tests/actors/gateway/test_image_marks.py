"""Marks of images in a session's text: found in order, replaced and restored."""

from __future__ import annotations

import pytest

from actors.gateway.image_marks import find_digests, make_mark, replace_marks, restore_marks
from actors.gateway.refusals import CallRefused
from actors.gateway.session_source import WaitCause
from asyncrl.contract.blobs.images import MARKER

ONE, TWO = "0123456789abcdef" * 2, "f" * 32


def test_marks_become_markers_and_come_back_in_order() -> None:
    text = f"a{make_mark(ONE)}b{make_mark(TWO)}{make_mark(ONE)}"
    assert find_digests(text) == [ONE, TWO, ONE] and find_digests("none") == []
    written = replace_marks(text)
    assert written == f"a{MARKER}b{MARKER}{MARKER}"
    assert restore_marks(f"<{written}>", [ONE, TWO, ONE]) == f"<{text}>"
    assert restore_marks(written, [ONE, TWO]) is None
    assert restore_marks(written, [ONE, TWO, ONE, TWO]) is None
    assert restore_marks("none", []) == "none"


def test_only_whole_digests_are_marks() -> None:
    for text in (make_mark(ONE[:-1]), make_mark(ONE + "0"), make_mark(ONE.upper()), ONE):
        assert find_digests(text) == [] and replace_marks(text) == text


def test_a_text_with_the_model_s_own_token_is_refused() -> None:
    with pytest.raises(CallRefused) as refused:
        replace_marks(f"see {MARKER}")
    assert str(refused.value) == (
        f"a text has {MARKER}, which is the model's token of an image: send the image as a data: "
        "URL in the content of a message"
    )
    error = refused.value
    assert (error.status, error.code, error.param) == (400, "invalid_image", "messages")


def test_a_wait_that_no_setting_ends_has_no_time_left() -> None:
    assert WaitCause("place", "a place") == ("place", "a place", "", 0.0)
