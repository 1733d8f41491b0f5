from __future__ import annotations

import pytest

from neuralmean.monitor.status import KIND_SENTENCES, Alarm


def _alarm(strangeness):
    flagged = sum(strangeness.values())
    return Alarm(9, "items", (3, 5), "most inputs", 20, flagged, strangeness, ())


def test_an_alarm_says_which_kind_drifts():
    sentence = _alarm({"appearance": 6, "both": 2, "content": 1}).sentence
    assert sentence.startswith(KIND_SENTENCES["most inputs"])
    assert "Of 1 flagged, 1 looks unlike the training data and 0 show what" in _alarm({"appearance": 1}).sentence
    assert "Of 9 flagged, 8 look unlike the training data and 3 show what belongs to no known class." in sentence


def test_one_flagged_input_is_told_in_the_singular():
    sentence = _alarm({"appearance": 1, "content": 1}).sentence
    assert "Of 2 flagged, 1 looks unlike the training data and 1 shows what belongs to no known class." in sentence


@pytest.mark.parametrize("strangeness", [{}, {"unsure": 4}])
def test_an_alarm_without_known_kinds_says_nothing_of_them(strangeness):
    assert _alarm(strangeness).sentence == KIND_SENTENCES["most inputs"]
