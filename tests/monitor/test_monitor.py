"""The monitor: what it counts, when it calls out, what it names, and that a restart changes nothing."""

import copy
import json
import math
import re
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from neuralmean import Detector
from neuralmean.detector.decision import Decision
from neuralmean.errors import ArtefactError, InputError, ModelMismatchError, NotFittedError
from neuralmean.files.artefact import Artefact
from neuralmean.monitor.block_test import BLOCK
from neuralmean.monitor.counters import P_VALUE_EDGES
from neuralmean.monitor.monitor import Monitor
from neuralmean.stats.calibration import Calibration
from neuralmean.stats.held_out_profile import ProfileBuilder


@pytest.fixture
def detector(model, images):
    return Detector(model, scorer="average").calibrate(images[:200])


def _normal(n, seed, shift=0.0):
    return shift + torch.randn(n, generator=torch.Generator().manual_seed(seed))


def _decision(detector, scores):
    return Decision(scores, detector.calibration)


def _with_normal_scores(detector, n=500, seed=0, known=None):
    """The detector, calibrated as if its scores were standard normal, and the held-out vectors `known`."""
    calibration = type(detector.calibration).of(_normal(n, seed), 0.05)
    profile = None if known is None else _profile(known)
    detector.adopt(replace(detector.learnt, calibration=calibration, profile=profile))
    return detector


def _profile(vectors):
    seen = ProfileBuilder(torch.tensor([0] * 4 + [1] * 6), 2)  # bn1 has the channels 0 to 3, bn2 4 to 9
    seen.add(vectors)
    return seen.profile()


def test_counters_window_and_histogram_are_those_of_the_decisions(detector):
    monitor = Monitor(detector, window=32)
    calibration = Calibration.of(torch.arange(1999.0), 0.002)
    p_values = torch.tensor([0.001, 0.0015, 0.05, 0.9, 1.0])
    monitor.update(Decision(1999.0 - (2000 * p_values - 1).round(), calibration))
    status = monitor.status()
    assert (status.n_seen, status.n_ood, status.n_window, status.window_ood_rate) == (5, 2, 5, 0.4)
    counts = dict(zip(P_VALUE_EDGES, status.p_value_counts, strict=True))
    assert {edge: n for edge, n in counts.items() if n} == {0.001: 1, 0.002: 1, 0.05: 1, 0.9: 1, 1.0: 1}
    assert status.p_value_sum == pytest.approx(p_values.sum().item())
    assert status.expected_ood_rate == 0.05
    for _ in range(8):
        monitor.update(Decision(torch.full((5,), 1000.0), calibration))
    status = monitor.status()
    assert (status.n_seen, status.n_ood, status.n_window, status.window_ood_rate) == (45, 2, 32, 0.0)
    assert len(monitor.window_p_values()) == 32


def test_false_flags_of_the_window_are_bounded_as_those_of_a_decision(detector):
    monitor = Monitor(_with_normal_scores(detector))
    assert monitor.window_false_flags() == (0, 0)
    decision = _decision(detector, torch.cat([_normal(80, 1), _normal(20, 2, shift=9.0)]))
    monitor.update(decision)
    assert monitor.window_false_flags() == (int(decision.is_ood.sum()), decision.most_false())


def test_an_empty_monitor_knows_that_it_knows_nothing(detector):
    monitor = Monitor(detector)
    monitor.update(_decision(detector, torch.zeros(0)))
    status = monitor.status()
    assert (status.n_seen, status.window_ood_rate, status.discrepancy, status.layers) == (0, None, None, ())
    assert repr(monitor) == "Monitor(0 items, 0 OOD, no drift)"
    assert (status.drift, status.drift_at, status.drift_by, status.log10_evidence) == (False, None, None, 0.0)
    assert status.log10_needed == pytest.approx(math.log10(100 / 0.75))  # three quarters of 1 %


def test_the_alarm_goes_off_soon_after_the_turn_and_stays_on_until_reset(detector):
    monitor = Monitor(_with_normal_scores(detector))
    assert not monitor.update(_decision(detector, _normal(1000, 1)))
    assert monitor.update(_decision(detector, _normal(100, 2, shift=2.0)))
    status = monitor.status()
    assert 1000 < status.drift_at <= 1040
    assert status.drift_by == "items"
    assert f"drift since item {status.drift_at}" in repr(monitor)
    assert monitor.update(_decision(detector, _normal(500, 3)))
    assert monitor.status().drift_at == status.drift_at
    monitor.reset()
    assert not monitor.drift
    assert (monitor.status().n_since_reset, monitor.status().n_seen) == (0, 1600)
    assert not monitor.update(_decision(detector, _normal(500, 4)))


def test_a_few_strange_items_among_many_good_ones_are_enough(detector):
    monitor = Monitor(_with_normal_scores(detector, n=2000))
    monitor.update(_decision(detector, _normal(1000, 1)))
    scores = _normal(1500, 2)
    scores[::20] += 6  # one in twenty
    assert monitor.update(_decision(detector, scores))
    assert monitor.status().drift_at < 1800


def test_a_stream_that_is_too_typical_is_a_turn_as_well(detector):
    monitor = Monitor(_with_normal_scores(detector))
    assert monitor.update(_decision(detector, _normal(400, 1, shift=-2.0)))


def test_false_alarms_on_streams_like_the_held_out_data_keep_the_promise(detector, tmp_path):
    # 40 streams of 1,500 items, both tests, promised 10 % in all: 10 or more has probability 0.5 % at exactly 10 %.
    alarms = 0
    width = len(detector.channels)
    for repeat in range(40):
        monitor = Monitor(_with_normal_scores(detector, n=200, seed=repeat), false_alarm_rate=0.1, seed=repeat)
        generator = torch.Generator().manual_seed(1000 + repeat)
        vectors = torch.randn(1500, width, generator=generator)
        alarms += monitor.update(_decision(detector, _normal(1500, 2000 + repeat)), vectors=vectors)
    assert alarms < 10


def test_blocks_show_a_turn_that_no_single_item_shows(detector):
    monitor = Monitor(_with_normal_scores(detector), window=256)
    generator = torch.Generator().manual_seed(0)
    quiet = torch.randn(1600, 10, generator=generator)
    moved = torch.randn(640, 10, generator=generator) + 0.8
    assert not monitor.update(_decision(detector, _normal(1600, 1)), vectors=quiet)
    assert monitor.update(_decision(detector, _normal(640, 2)), vectors=moved)
    assert monitor.status().drift_by == "blocks"
    assert (monitor.status().drift_at - 1600) % BLOCK == 0


def test_the_layers_that_moved_are_named_in_standard_deviations(detector):
    monitor = Monitor(_with_normal_scores(detector), window=512)
    generator = torch.Generator().manual_seed(0)
    quiet = torch.randn(1024, 10, generator=generator)
    moved = torch.randn(512, 10, generator=generator)
    moved[:, 4:] += 1.5  # bn2 has the channels 4 to 9
    monitor.update(_decision(detector, _normal(1024, 1)), vectors=quiet)
    assert [shift.moved for shift in monitor.status().layers] == [False, False]
    monitor.update(_decision(detector, _normal(512, 2)), vectors=moved)
    status = monitor.status()
    assert [shift.layer for shift in status.layers] == ["bn2", "bn1"]
    assert [shift.moved for shift in status.layers] == [True, False]
    assert status.layers[0].shift == pytest.approx(1.5, abs=0.1)
    assert status.layers[1].shift < 0.1
    assert status.compared_with == "the first 512 items"
    assert status.discrepancy == pytest.approx(moved.double().mean(0).abs().mean().item())


def test_held_out_vectors_are_compared_with_from_the_first_item(detector):
    known = torch.randn(1000, 10, generator=torch.Generator().manual_seed(0))
    monitor = Monitor(_with_normal_scores(detector, known=known))
    monitor.update(_decision(detector, _normal(64, 1)), vectors=torch.full((64, 10), 3.0))
    status = monitor.status()
    assert status.compared_with == "the 1,000 held-out examples"
    assert status.layers[0].shift == pytest.approx(3.0, abs=0.2)
    assert [shift.moved for shift in status.layers] == [True, True]


def test_a_few_held_out_vectors_are_no_standard(detector):
    monitor = Monitor(_with_normal_scores(detector, known=torch.randn(127, 10)))
    monitor.update(_decision(detector, _normal(64, 1)), vectors=torch.randn(64, 10))
    assert monitor.status().compared_with == "the training data"


def test_a_turn_shows_in_the_latest_items_before_it_shows_in_the_window(detector):
    generator = torch.Generator().manual_seed(0)
    monitor = Monitor(_with_normal_scores(detector, known=torch.randn(1000, 10, generator=generator)))
    quiet, turned = torch.randn(500, 10, generator=generator), torch.randn(24, 10, generator=generator)
    turned[:, 4:] += 2
    monitor.update(_decision(detector, _normal(500, 1)), vectors=quiet)
    assert monitor.status().n_compared == 500
    assert not any(shift.moved for shift in monitor.status().layers)
    monitor.update(_decision(detector, _normal(24, 2)), vectors=turned)
    status = monitor.status()
    assert [(shift.layer, shift.moved) for shift in status.layers] == [("bn2", True), ("bn1", False)]
    assert status.n_compared == 44  # what is open behind the last whole block, and that block: 12 + 32
    assert status.layers[0].shift == pytest.approx(2 * 24 / 44, abs=0.2)


def test_few_items_name_no_layer_however_strange(detector):
    monitor = Monitor(_with_normal_scores(detector, known=torch.randn(1000, 10)))
    monitor.update(_decision(detector, _normal(31, 1)), vectors=torch.full((31, 10), 9.0))
    assert monitor.status().layers[0].shift > 8
    assert not any(shift.moved for shift in monitor.status().layers)
    monitor.update(_decision(detector, _normal(1, 2)), vectors=torch.full((1, 10), 9.0))
    assert all(shift.moved for shift in monitor.status().layers)


def test_a_monitor_stays_with_the_calibration_that_it_began_with(detector, tmp_path):
    monitor = Monitor(_with_normal_scores(detector, known=torch.randn(1000, 10)))
    monitor.update(_decision(detector, _normal(64, 1)), vectors=torch.randn(64, 10))
    before = copy.copy(detector)
    _with_normal_scores(detector, seed=1, known=5 + torch.randn(1000, 10))
    assert not any(shift.moved for shift in monitor.status().layers)
    monitor.save(tmp_path / "state")
    with pytest.raises(ModelMismatchError, match="but got another one"):
        Monitor.load(tmp_path / "state", detector)
    assert Monitor.load(tmp_path / "state", before).status() == monitor.status()
    monitor.reset()
    monitor.update(_decision(detector, _normal(64, 1)), vectors=torch.randn(64, 10))
    assert all(shift.moved for shift in monitor.status().layers)


def test_layers_do_not_move_on_streams_like_the_held_out_data(detector):
    # Asked 20 times on each of 50 streams, at 0.1 % each time: the looks of a stream hang together, so 10 streams would be
    # the most by far.
    moved = 0
    for repeat in range(50):
        generator = torch.Generator().manual_seed(repeat)
        known = torch.randn(500, 1, generator=generator) + torch.randn(500, 10, generator=generator)
        monitor = Monitor(_with_normal_scores(detector, known=known))
        any_moved = False
        for _ in range(20):
            vectors = torch.randn(24, 1, generator=generator) + torch.randn(24, 10, generator=generator)
            monitor.update(_decision(detector, torch.zeros(24)), vectors=vectors)
            any_moved |= any(shift.moved for shift in monitor.status().layers)
        moved += any_moved
    assert moved <= 2


def test_a_young_stream_without_held_out_vectors_is_compared_with_the_training_data(detector, strange):
    detector.adopt(replace(detector.learnt, profile=None))
    monitor = Monitor(detector, every=1)
    monitor.update(vectors=detector.discrepancy(strange[:40]))
    assert monitor.status().compared_with == "the training data"
    assert monitor.status().layers[0].moved


def test_vectors_alone_are_scored_here(detector, images, strange):
    by_decision, by_vectors = Monitor(detector), Monitor(detector)
    by_decision.update(detector.predict(images[200:]))
    by_decision.update(detector.predict(strange))
    by_vectors.update(vectors=detector.discrepancy(images[200:]))
    by_vectors.update(vectors=detector.discrepancy(strange))
    assert by_decision.status().n_ood == by_vectors.status().n_ood
    assert by_decision.status().drift_at == by_vectors.status().drift_at is not None


def test_batching_changes_neither_alarm_nor_counters(detector):
    scores = torch.cat([_normal(100, 1), _normal(200, 2, shift=1.0)])
    vectors = torch.randn(300, 10, generator=torch.Generator().manual_seed(3))
    _with_normal_scores(detector)
    whole, parts = Monitor(detector, window=64), Monitor(detector, window=64)
    whole.update(_decision(detector, scores), vectors=vectors)
    for begin in range(0, 300, 7):
        part = slice(begin, begin + 7)
        parts.update(_decision(detector, scores[part]), vectors=vectors[part])
    a, b = whole.status(), parts.status()
    assert replace(a, layers=(), discrepancy=None, p_value_sum=0.0) == replace(
        b, layers=(), discrepancy=None, p_value_sum=0.0
    )
    assert [shift.layer for shift in a.layers] == [shift.layer for shift in b.layers]
    assert a.discrepancy == pytest.approx(b.discrepancy, rel=1e-12)


@pytest.mark.parametrize("profile", [False, True], ids=["learnt", "given"])
def test_a_restart_changes_not_a_bit(detector, tmp_path, profile):
    _with_normal_scores(detector, known=torch.randn(200, 10) if profile else None)
    monitor = Monitor(detector, window=64, false_alarm_rate=0.001, seed=4)
    vectors = torch.randn(400, 10, generator=torch.Generator().manual_seed(3))
    scores = torch.cat([_normal(300, 1), _normal(100, 2, shift=1.0)])
    monitor.update(_decision(detector, scores[:201]), vectors=vectors[:201])
    monitor.save(tmp_path / "state")
    again = Monitor.load(tmp_path / "state", detector)
    assert again.status() == monitor.status()
    for one in (monitor, again):
        one.update(_decision(detector, scores[201:]), vectors=vectors[201:])
    assert again.status() == monitor.status()
    assert monitor.drift
    monitor.save(tmp_path / "a")
    again.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert Monitor.load(tmp_path / "a", detector).status() == monitor.status()
    for one in (monitor, again):
        one.reset()
        one.update(_decision(detector, scores))
    assert again.status() == monitor.status()


def test_the_state_of_another_detector_is_refused(detector, tmp_path):
    Monitor(detector).save(tmp_path / "state")
    others = (
        _with_normal_scores(copy.copy(detector), known=torch.randn(200, 10)),
        _with_normal_scores(copy.copy(detector)),
    )
    others[0].adopt(replace(others[0].learnt, calibration=detector.calibration))
    for other in others:
        with pytest.raises(ModelMismatchError, match=r"Expected the detector that the monitor in .* was watching, but"):
            Monitor.load(tmp_path / "state", other)


def test_files_that_are_no_state_are_refused(detector, tmp_path):
    detector.save(tmp_path / "model.nmd")
    with pytest.raises(ArtefactError, match="to be the state of a monitor, but it is something else"):
        Monitor.load(tmp_path / "model.nmd", detector)
    (tmp_path / "cut").write_bytes(b"")
    with pytest.raises(ArtefactError, match="truncated"):
        Monitor.load(tmp_path / "cut", detector)
    Monitor(detector).save(tmp_path / "state")
    good = Artefact.read(tmp_path / "state")
    header = {key: value for key, value in json.loads(json.dumps(good.header)).items() if key != "digest"}
    header["items"]["ranks"]["capacity"] = 3
    Artefact(header, good.tensors).write(tmp_path / "bad")
    with pytest.raises(ArtefactError, match="to be the state of a monitor, but the ranks have another capacity"):
        Monitor.load(tmp_path / "bad", detector)


@pytest.mark.parametrize("window", [0, 31, 33, 64.0, True, "64"], ids=repr)
def test_a_window_that_is_no_multiple_of_a_block_is_refused(detector, window):
    with pytest.raises(InputError, match=re.escape(f"Expected `window` to be a multiple of 32, but got {window!r}.")):
        Monitor(detector, window=window)


def test_wrong_arguments_are_refused_with_a_cure(detector, model):
    with pytest.raises(InputError, match=re.escape("Expected `false_alarm_rate` to be a number in the (0, 1) range")):
        Monitor(detector, false_alarm_rate=1.0)
    with pytest.raises(NotFittedError, match=r"Expected a detector with a threshold to monitor\. Call `fit`"):
        Monitor(Detector(model))
    monitor = Monitor(detector)
    with pytest.raises(InputError, match="Expected a decision or vectors to update with, but got neither"):
        monitor.update()
    with pytest.raises(InputError, match="Expected a decision, as `detector.predict` returns it, but got Tensor"):
        Monitor(detector).update(torch.zeros(4, 3, 8, 8))
    for seed in (-1, "1", 1.0, True):
        with pytest.raises(InputError, match=f"Expected `seed` to be a whole number of at least 0, but got {seed!r}"):
            Monitor(detector, seed=seed)
    with pytest.raises(InputError, match=re.escape("Expected vectors as a tensor of shape (N, 10), but got ndarray.")):
        Monitor(detector).update(vectors=torch.zeros(4, 10).numpy())
    with pytest.raises(InputError, match=re.escape("Expected vectors as a tensor of shape (N, 10), but got (4, 9).")):
        monitor.update(vectors=torch.zeros(4, 9))
    with pytest.raises(InputError, match="Expected finite vectors, but got NaN or Inf"):
        monitor.update(vectors=torch.full((4, 10), float("nan")))
    with pytest.raises(InputError, match="Expected finite scores, but got NaN or Inf"):
        monitor.update(_decision(detector, torch.tensor([float("inf")])))
    with pytest.raises(InputError, match="Expected a vector for each of 3 decisions, but got 4"):
        monitor.update(_decision(detector, torch.zeros(3)), vectors=torch.zeros(4, 10))
    detector.scorer.needs = frozenset({"output"})
    with pytest.raises(InputError, match="Expected a decision, as the scorer needs the model's output besides vectors"):
        monitor.update(vectors=torch.zeros(4, 10))
    assert monitor.status().n_seen == 0


def test_the_guarantee_says_what_the_held_out_data_was(detector, model, images):
    assert Monitor(detector).guarantee == (
        "On a stream like the held-out data the alarm ever goes off with a probability of at most 0.01."
    )
    with pytest.warns(UserWarning, match="pass `held_out`"):
        weak = Detector(model, scorer="average").fit(images)
    assert "But the held-out data was not: the threshold comes from" in Monitor(weak).guarantee


def test_threads_may_update_and_look_at_once(detector):
    monitor = Monitor(_with_normal_scores(detector), window=64)
    vectors = torch.randn(8, 10)

    def feed(seed):
        for step in range(20):
            monitor.update(_decision(detector, _normal(8, 100 * seed + step)), vectors=vectors)
            monitor.status()

    threads = [threading.Thread(target=feed, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    status = monitor.status()
    assert status.n_seen == sum(status.p_value_counts) == 640


def test_the_monitor_needs_no_extra():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['fastapi', 'uvicorn', 'prometheus_client', 'starlette']));"
        "import neuralmean.monitor.monitor"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- correlated streams, repeats, accepted drift, details of an alarm


def _correlated(n, seed, rho):
    noise = np.random.default_rng(seed).normal(size=n)
    values = [noise[0]]
    for step in noise[1:]:
        values.append(rho * values[-1] + (1 - rho**2) ** 0.5 * step)
    return torch.tensor(values)


@pytest.mark.parametrize("rho", [0.5, 0.9, 0.99])
def test_streams_whose_neighbours_resemble_each_other_raise_no_alarm(detector, rho):
    for seed in range(4):
        monitor = Monitor(_with_normal_scores(detector, seed=seed), seed=seed)
        assert not monitor.update(_decision(detector, _correlated(3000, 100 + seed, rho)))


def test_a_change_of_a_correlated_stream_is_noticed_although_later(detector):
    monitor = Monitor(_with_normal_scores(detector))
    assert not monitor.update(_decision(detector, _correlated(2000, 5, 0.9)))
    assert monitor.update(_decision(detector, _correlated(3000, 6, 0.9) + 3))
    assert monitor.status().every >= 4
    assert monitor.alarm.since[0] <= 2001 + 64


def test_the_user_may_say_that_items_are_independent_or_how_far_apart_they_are(detector):
    scores = _correlated(3000, 7, 0.99)
    assert Monitor(_with_normal_scores(detector), every=1).update(_decision(detector, scores))
    assert not Monitor(detector, every=300).update(_decision(detector, scores))
    assert Monitor(detector, every=300).status().every == 1024
    with pytest.raises(InputError, match="Expected `every` to be None or a number from 1 to 1024, but got 0"):
        Monitor(detector, every=0)


@pytest.mark.parametrize("with_vectors", [False, True], ids=["scores", "vectors"])
def test_a_frozen_camera_is_an_alarm_of_its_own_within_twenty_repeats(detector, with_vectors):
    for seed in range(12):
        monitor = Monitor(_with_normal_scores(detector, seed=seed))
        scores, vectors = _normal(500, 50 + seed), torch.randn(500, 10)
        assert not monitor.update(_decision(detector, scores), vectors=vectors if with_vectors else None)
        for _ in range(20):
            # The last digits of the same input differ from batch to batch.
            one = scores[-1:] * (1 + 1e-7)
            monitor.update(_decision(detector, one), vectors=vectors[-1:] if with_vectors else None)
        assert monitor.alarm.test == monitor.alarm.kind == "repeats"
        assert monitor.alarm.item <= 520
        assert monitor.alarm.since[0] <= 501
        assert monitor.alarm.since[1] >= 500
        assert "camera that froze" in monitor.alarm.sentence


def test_equal_scores_of_different_inputs_are_no_repeats(detector):
    monitor = Monitor(_with_normal_scores(detector))
    monitor.update(_decision(detector, _normal(200, 1)), vectors=torch.randn(200, 10))
    monitor.update(_decision(detector, torch.full((30,), 0.1)), vectors=torch.randn(30, 10))
    assert monitor.alarm is None or monitor.alarm.test != "repeats"


def test_an_alarm_says_since_when_of_what_kind_and_shows_examples(detector):
    right = 0
    for seed in range(20):
        monitor = Monitor(_with_normal_scores(detector, seed=seed), seed=seed)
        scores = torch.cat([_normal(700, 300 + seed), _normal(100, 400 + seed, shift=2.0)])
        assert monitor.update(_decision(detector, scores))
        alarm = monitor.alarm
        right += alarm.since[0] <= 701 <= alarm.since[1]
        assert alarm.since[0] <= alarm.since[1] <= alarm.item
        assert alarm.n_since == alarm.item - alarm.since[1] + 1
        assert alarm.examples[0] == alarm.since[1] + int(scores[alarm.since[1] - 1 : alarm.item].argmax())
        assert alarm.kind == "most inputs"
    assert right >= 14  # of 20; 90 % are promised if the change were one of those that are bet on
    scores = torch.cat([_normal(1000, 1), _normal(1500, 2)])
    scores[1000::20] += 6
    monitor = Monitor(_with_normal_scores(detector, n=2000))
    monitor.update(_decision(detector, scores))
    assert monitor.alarm.kind == "some inputs"


def test_what_is_accepted_becomes_normal_and_the_old_reference_comes_back(detector, tmp_path):
    monitor = Monitor(_with_normal_scores(detector))
    monitor.update(_decision(detector, _normal(300, 1)))
    assert monitor.update(_decision(detector, _normal(30, 2, shift=1.5)))
    with pytest.raises(InputError, match="Expected at least 100 items to accept as normal, but got"):
        monitor.accept()
    monitor.update(_decision(detector, _normal(400, 3, shift=1.5)))
    monitor.accept()
    assert not monitor.drift
    assert "accepted items" in monitor.status().reference
    assert "accepted as normal" in monitor.guarantee
    assert not monitor.update(_decision(detector, _normal(500, 4, shift=1.5)))
    monitor.save(tmp_path / "state")
    again = Monitor.load(tmp_path / "state", detector)
    assert again.status() == monitor.status()
    assert again.update(_decision(detector, _normal(60, 5, shift=4.0)))
    monitor.revert()
    assert monitor.status().reference == "held-out data"
    assert monitor.update(_decision(detector, _normal(100, 6, shift=1.5)))


def test_mild_drift_is_followed_and_severe_drift_is_an_alarm(detector):
    monitor = Monitor(_with_normal_scores(detector), follow=0.3)
    monitor.update(_decision(detector, _normal(500, 1)))
    assert not monitor.update(_decision(detector, _normal(800, 2, shift=0.6)))
    assert monitor.status().n_followed >= 1
    assert monitor.update(_decision(detector, _normal(100, 3, shift=4.0)))
    with pytest.raises(InputError, match="Expected `follow` to be a number in the"):
        Monitor(detector, follow=2)
