from __future__ import annotations

import pytest
import torch
from torch import nn

from neuralmean import Detector
from neuralmean.data.batch import to_batch
from neuralmean.detector.early_exit import (
    CascadeScorer,
    ExitRun,
    SpreadScorer,
    bar_of,
    check_statistic,
    make,
    start_exit_run,
)
from neuralmean.errors import ArtefactError, InputError
from neuralmean.files.artefact import Artefact
from neuralmean.models.layers import Layer, select_layers
from neuralmean.recording import Recorder
from neuralmean.scorers import AverageScorer, LogisticScorer, Observation
from neuralmean.stats.calibration import Calibration

LAYERS = tuple(Layer(f"bn{i}", "batchnorm", 3) for i in range(4))


def fitted(seed=0, outliers=None):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2000, 12, generator=generator)
    return CascadeScorer.around(AverageScorer(), LAYERS).fit(rows, outliers)


class Deep(nn.Module):
    """Six norms in a row; counts how many have run."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(6))
        self.fc = nn.Linear(3, 2)
        self.ran = 0

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).relu()
            self.ran += 1
        return self.fc(x.mean((2, 3)))


@pytest.fixture
def deep():
    model = Deep().train()
    with torch.no_grad():
        for _ in range(40):
            model(torch.rand(64, 3, 8, 8))
    model.ran = 0
    return model.eval()


def inputs(n, seed):
    return torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def test_spread_is_the_mean_deviation_in_units_of_the_deviation():
    scorer = SpreadScorer().fit(torch.tensor([[0.0, 10.0], [2.0, 30.0]]))  # means 1, 20; deviations 1, 10
    assert scorer.score(torch.tensor([[3.0, 20.0], [1.0, 50.0]])).tolist() == [1.0, 1.5]


def test_exits_stand_where_the_shares_of_the_layers_say():
    layers = [Layer(f"bn{i}", "batchnorm", 2) for i in range(16)]
    cascade = CascadeScorer.around(AverageScorer(), layers)
    assert (cascade.depths, cascade.widths) == ([2, 4, 8, 12], [4, 8, 16, 24])


def test_there_is_no_exit_behind_a_layer_that_runs_twice():
    layers = [Layer(f"bn{i}", "batchnorm", 2) for i in range(16)]
    assert CascadeScorer.around(AverageScorer(), layers, repeated=[5, 9]).depths == [2, 4]


def test_a_single_layer_has_no_early_exit():
    with pytest.raises(InputError, match="at least 2 watched layers for an early exit, each run once, but got 1"):
        CascadeScorer.around(AverageScorer(), LAYERS[:1])


@pytest.mark.parametrize("statistic", ["variance", "both"])
def test_only_means_are_known_early(statistic):
    with pytest.raises(InputError, match=f"Expected `statistic='mean'` for an early exit, but got '{statistic}'"):
        check_statistic(statistic)


def _reference_score(cascade, rows):
    """The formula of the module, a row at a time."""
    result = []
    for row in rows:
        value = (cascade.full.score(row[None]).item() - cascade.zero_[-1].item()) / cascade.unit_[-1].item()
        for k, (scorer, width) in enumerate(zip(cascade.exits, cascade.widths, strict=True)):
            excess = scorer.score(row[None, :width]).item() - cascade.zero_[k].item()
            if excess > 0:
                value = max(value, cascade.lift_.item() + excess / cascade.unit_[k].item())
        result.append(value)
    return torch.tensor(result)


def test_the_score_is_the_formula():
    cascade, rows = fitted(), torch.randn(50, 12) * torch.linspace(0.5, 4, 50)[:, None]
    torch.testing.assert_close(cascade.score(rows), _reference_score(cascade, rows), rtol=1e-4, atol=1e-4)


def test_ordinary_rows_keep_the_order_of_the_full_scorer():
    cascade, rows = fitted(), torch.randn(500, 12)
    plain = (AverageScorer().score(rows) - cascade.zero_[-1]) / cascade.unit_[-1]
    changed = (cascade.score(rows) != plain).float().mean()
    assert changed <= 0.02


def test_the_false_alarm_rate_holds_for_the_whole_cascade():
    rates = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(100 + seed)
        cascade = fitted(seed)
        calibration = Calibration.of(cascade.score(torch.randn(500, 12, generator=generator)), 0.05)
        rates.append((cascade.score(torch.randn(2000, 12, generator=generator)) > calibration.threshold).float().mean())
    assert 0.04 < torch.stack(rates).mean() < 0.06


def test_what_an_exit_says_is_never_taken_back():
    cascade = fitted()
    rows = torch.randn(400, 12) * 3
    final = cascade.score(rows)
    so_far = None
    for index, width in enumerate(cascade.widths):
        so_far = cascade.after_exit(so_far, index, rows[:, :width])
        assert bool((so_far <= final).all())
    assert bool((so_far > 0).any())
    assert torch.equal(cascade.score_after(so_far, rows), final)


def test_a_pass_without_exits_is_scored_all_the_same():
    cascade, rows = fitted(), torch.randn(50, 12) * 3
    assert torch.equal(ExitRun(cascade, torch.zeros(12), 9.0).score(rows), cascade.score(rows))


def test_exits_that_see_nothing_leave_the_score_to_the_full_scorer():
    cascade, rows = fitted(), torch.zeros(3, 12)
    assert cascade.after_exit(None, 0, rows[:, : cascade.widths[0]]) is None
    assert torch.equal(cascade.score_after(None, rows), cascade.score(rows))


def test_the_bar_is_never_below_the_threshold():
    many = Calibration.of(torch.arange(1000.0), 0.05)
    assert many.threshold == 950.0
    assert bar_of(many) == 995.0  # the ceil(1001 * 0.995) = 996th smallest
    assert bar_of(Calibration.of(torch.arange(50.0), 0.05)) == 49.0  # too few for 0.5 %: the largest
    assert bar_of(Calibration.of(torch.arange(1000.0), 0.001)) == Calibration.of(torch.arange(1000.0), 0.001).threshold


def test_with_ood_rows_the_exits_learn_from_them():
    outliers = torch.randn(300, 12, generator=torch.Generator().manual_seed(9))
    outliers[:, 0] += 4
    assert fitted(outliers=outliers).exit_scorer == "logistic"
    assert fitted().exit_scorer == "spread"


def test_the_state_survives_saving():
    cascade, rows = fitted(), torch.randn(30, 12) * 2
    twin = make("cascade", cascade.get_options()).load_state(cascade.state())
    assert torch.equal(twin.score(rows), cascade.score(rows))
    with pytest.raises(InputError, match="the state of a cascade with 0 exits"):
        CascadeScorer().load_state(cascade.state())


def test_a_scorer_of_ones_own_is_not_saved():
    class Own:
        def fit(self, inliers, outliers=None):
            return self

        def score(self, vectors):
            return vectors.abs().amax(1)

    cascade = CascadeScorer.around(Own(), LAYERS).fit(torch.randn(100, 12))
    assert cascade.score(torch.randn(3, 12)).shape == (3,)
    with pytest.raises(InputError, match="a scorer that comes with neuralmean to save, but got Own"):
        cascade.state()


def test_other_scorers_are_made_by_name_too():
    assert isinstance(make("average", {}), AverageScorer)


def test_a_cascade_around_a_cascade_is_one_cascade():
    inner = AverageScorer()
    assert CascadeScorer.around(CascadeScorer.around(inner, LAYERS), LAYERS).full is inner


def test_a_scorer_that_needs_more_than_the_vector_gets_it():
    class Needs(AverageScorer):
        needs = frozenset({"logits"})

        def score(self, vectors):
            return vectors.vector.abs().mean(1) + vectors.logits[:, 0]

    rows = Observation(torch.randn(200, 12), torch.zeros(200, 2))
    cascade = CascadeScorer.around(Needs(), LAYERS)
    assert cascade.needs == {"logits"}
    assert cascade.fit(rows).score(rows).shape == (200,)


def test_the_pass_stops_only_once_every_row_is_certain(deep):
    recorder = Recorder(deep, select_layers(deep))
    means = recorder(to_batch(inputs(400, 1))).mean
    reference = means.mean(0).double()
    cascade = CascadeScorer.around(AverageScorer(), recorder.layers).fit(means - reference.float())
    bar = bar_of(Calibration.of(cascade.score(means - reference.float()), 0.05))
    strange, usual = inputs(1, 2) * 50, inputs(1, 3)
    for x, stops in [(strange, True), (usual, False), (torch.cat([strange, usual]), False)]:
        deep.ran = 0
        watch = ExitRun(cascade, reference, bar)
        recording = recorder(to_batch(x), exits=watch)
        assert watch.stopped is stops
        assert (recording.output is None) is stops
        assert (deep.ran < 6) is stops


@pytest.mark.filterwarnings("ignore::neuralmean.errors.CalibrationWarning")
class TestFitWithEarlyExit:
    def test_strange_inputs_stop_the_pass_and_usual_ones_keep_their_output(self, deep):
        detector = Detector(deep, scorer="average").fit(inputs(400, 1), early_exit=True, held_out=inputs(300, 2))
        x = inputs(4, 5)
        output, decision = detector(x)
        assert torch.equal(output, deep(x))
        assert torch.equal(decision.score, detector.predict(x).score)
        deep.ran = 0
        output, decision = detector(x * 50)
        assert output is None
        assert decision.is_ood.all()
        assert (decision.p_value <= 0.05).all()
        assert deep.ran < 6

    def test_stopped_or_not_the_verdict_is_the_same(self, deep):
        detector = Detector(deep, scorer="average").fit(inputs(400, 1), early_exit=True, held_out=inputs(300, 2))
        x = inputs(30, 6) * torch.linspace(0.2, 20, 30)[:, None, None, None]
        whole = detector.predict(x)
        one_by_one = [detector(row[None])[1].is_ood.item() for row in x]
        assert one_by_one == whole.is_ood.tolist()

    def test_it_is_saved_and_loaded(self, deep, tmp_path):
        detector = Detector(deep, scorer="logistic").fit(inputs(300, 1), inputs(100, 4) * 3, early_exit=True)
        detector.save(tmp_path / "d.nmd")
        loaded = Detector.load(tmp_path / "d.nmd", deep)
        x = inputs(5, 7)
        assert torch.equal(loaded.score(x), detector.score(x))
        assert loaded(x * 50)[0] is None
        assert isinstance(loaded.scorer.full, LogisticScorer)

    def test_calibrating_again_is_joint_too(self, deep):
        detector = Detector(deep, scorer="average").fit(inputs(400, 1), early_exit=True).calibrate(inputs(500, 8))
        assert (detector.score(inputs(500, 8)) > detector.threshold).float().mean() <= 0.05
        assert start_exit_run(detector) is not None

    def test_without_it_nothing_stops(self, deep):
        detector = Detector(deep, scorer="average").fit(inputs(400, 1))
        assert start_exit_run(detector) is None
        assert detector(inputs(2, 3) * 50)[0] is not None


@pytest.mark.parametrize(
    "options",
    [{"depths": ["a"], "widths": [3]}, {"depths": [0], "widths": [3]}, {"depths": [2, 1], "widths": [3, 6]},
     {"depths": [1], "widths": [3, 6]}, {"depths": [1, 2, 3, 4, 5], "widths": [1, 2, 3, 4, 5]},
     {"depths": [True], "widths": [3]}],
)  # fmt: skip
def test_exits_of_a_file_must_make_sense(options):
    with pytest.raises(InputError, match="Expected"):
        make("cascade", options)


def test_exits_of_a_file_must_end_with_a_layer(deep, tmp_path):
    Detector(deep, scorer="average").fit(inputs(300, 1), held_out=inputs(300, 2), early_exit=True).save(
        tmp_path / "x.nmd"
    )
    artefact = Artefact.read(tmp_path / "x.nmd")
    options = artefact.header["scorer"]["options"]
    options["depths"] = [depth + 1 for depth in options["depths"]]
    del artefact.header["digest"]
    artefact.write(tmp_path / "x.nmd")
    with pytest.raises(ArtefactError, match="the exits do not end with a layer"):
        Detector.load(tmp_path / "x.nmd", deep)


def test_a_scorer_of_ones_own_that_takes_inliers_alone(deep):
    class Own:
        def fit(self, inliers):
            self.scale = inliers.abs().mean()

        def score(self, vectors):
            return vectors.abs().mean(1) / self.scale

    detector = Detector(deep, scorer=Own()).fit(inputs(300, 1), held_out=inputs(300, 2), early_exit=True)
    assert detector(inputs(3, 4) * 50)[1].is_ood.all()
