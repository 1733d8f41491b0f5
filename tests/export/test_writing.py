from __future__ import annotations

import builtins
import functools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from neuralmean import Detector
from neuralmean.detector.early_exit import CascadeScorer
from neuralmean.detector.kinds import KINDS
from neuralmean.errors import InputError, MissingExtraError, ModelInputError, NotFittedError
from neuralmean.export import METADATA_KEY, to_onnx, to_pt2
from neuralmean.export.detector_graph import KIND_NAMES, DetectorGraph
from tests.conftest import count_hooks, make_trained

pytestmark = [
    pytest.mark.filterwarnings("ignore::neuralmean.errors.CalibrationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SHAPE = (3, 8, 8)


def usual(n=120, seed=1):
    return torch.rand(n, *SHAPE, generator=torch.Generator().manual_seed(seed))


def mixture(n=24):
    """From usual to far out: both verdicts occur."""
    return usual(n, seed=3) * torch.linspace(0.5, 5, n)[:, None, None, None]


class Convolutions(nn.Module):
    """No norm at all, as VGG: the outputs of the convolutions are read."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 3), nn.Linear(4, 3)

    def forward(self, image):
        return self.fc(self.conv2(self.conv1(image).relu()).relu().mean((2, 3)))


class Transformer(nn.Module):
    """Patches, a class token and layer norms, as ViT."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.mix, self.fc = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.mix(self.norm1(x))
        return self.fc(self.norm2(x)[:, 0])


def run_onnx(path, **feeds):
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {key: value.numpy() for key, value in feeds.items()}), strict=True))


def assert_same(found, detector, x):
    output, decision = detector(x)
    np.testing.assert_allclose(found["output"], output.detach().numpy(), atol=1e-4)
    np.testing.assert_allclose(found["score"], decision.score.numpy(), atol=1e-4)
    np.testing.assert_allclose(found["p_value"], decision.p_value.numpy(), atol=1e-6)
    assert found["is_ood"].tolist() == decision.is_ood.tolist()
    assert 0 < decision.is_ood.sum() < len(x)
    if decision.p_content is not None:
        np.testing.assert_allclose(found["p_appearance"], decision.p_appearance.numpy(), atol=0.03)
        np.testing.assert_allclose(found["p_content"], decision.p_content.numpy(), atol=0.03)
        assert [KINDS[index] for index in found["kind"]] == decision.kind


@pytest.fixture(scope="module")
def _onnx():
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")


CASES = {
    "batch norm, average": lambda: (make_trained(), {"scorer": "average"}),
    "batch norm, logistic": lambda: (make_trained(), {"scorer": "logistic"}),
    "batch norm, mlp": lambda: (make_trained(), {"scorer": "mlp"}),
    "batch norm, typicality": lambda: (make_trained(), {"scorer": "typicality"}),
    "batch norm, both statistics": lambda: (make_trained(), {"scorer": "average", "statistic": "both"}),
    "convolutions": lambda: (Convolutions().eval(), {"scorer": "average"}),
    "layer norm": lambda: (Transformer().eval(), {"scorer": "logistic"}),
}


@functools.cache
def fit(case):
    model, options = CASES[case]()
    outliers = usual(seed=4) * 3 if options["scorer"] in ("logistic", "mlp") else None
    return Detector(model, **options).fit(usual(), outliers)


def names_of(detector):
    kinds = () if detector.learnt.kinds is None else KIND_NAMES
    return ("output", "score", "p_value", "is_ood", *kinds)


def name_of_input(case):
    return "image" if case == "convolutions" else "x"


@pytest.mark.parametrize("case", CASES)
def test_the_graph_says_what_the_detector_says(case):
    detector, x = fit(case), mixture()
    with torch.no_grad():
        found = DetectorGraph(detector, (name_of_input(case),), 1).eval()(x)
    assert_same({name: value.numpy() for name, value in zip(names_of(detector), found, strict=True)}, detector, x)
    assert count_hooks(detector.model) == 0


@pytest.mark.usefixtures("_onnx")
@pytest.mark.parametrize(
    "case", ["batch norm, logistic", *(pytest.param(case, marks=pytest.mark.slow) for case in CASES)]
)
def test_onnxruntime_says_what_the_detector_says(case, tmp_path):
    detector, name, x = fit(case), name_of_input(case), mixture()
    assert to_onnx(detector, tmp_path / "d.onnx", input_shape=SHAPE) == names_of(detector)
    assert_same(run_onnx(tmp_path / "d.onnx", **{name: x}), detector, x)
    for size in (1, 7):  # the batch is dynamic
        assert run_onnx(tmp_path / "d.onnx", **{name: x[:size]})["score"].shape == (size,)
    assert count_hooks(detector.model) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("_onnx")
def test_the_graph_holds_the_header_of_the_saved_file(tmp_path):
    import onnx

    detector = Detector(make_trained(), scorer="average").fit(usual())
    detector.info["model"] = "package:make"
    to_onnx(detector, tmp_path / "d.onnx", example_input=usual(1))
    graph = onnx.load(tmp_path / "d.onnx")
    onnx.checker.check_model(graph)
    (metadata,) = [entry.value for entry in graph.metadata_props if entry.key == METADATA_KEY]
    header = json.loads(metadata)
    assert header["calibration"]["threshold"] == detector.threshold
    assert (header["info"]["model"], header["format_version"]) == ("package:make", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("_onnx")
def test_a_cascade_is_in_the_graph_with_all_its_exits(tmp_path):
    model = make_trained()
    detector = Detector(model, scorer="average").fit(usual(200))
    cascade = CascadeScorer.around(detector.scorer, detector.watched).fit(detector.discrepancy(usual(200)))
    detector.adopt(replace(detector.learnt, scorer=cascade))
    detector.calibrate(usual(100, seed=2))
    to_onnx(detector, tmp_path / "d.onnx", input_shape=SHAPE)
    found, x = run_onnx(tmp_path / "d.onnx", x=mixture()), mixture()
    decision = detector.predict(x)
    np.testing.assert_allclose(found["score"], decision.score.numpy(), rtol=1e-4, atol=1e-4)
    assert found["is_ood"].tolist() == decision.is_ood.tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("_onnx")
def test_every_output_of_the_model_has_a_name(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_trained()

        def forward(self, x):
            logits = self.net(x)
            return {"logits": logits, "score": logits.amax(1)}

    detector = Detector(Two().eval(), scorer="average").fit(usual())
    names = to_onnx(detector, tmp_path / "d.onnx", input_shape=SHAPE)
    assert names == ("logits", "output_score", "score", "p_value", "is_ood")
    found, (output, decision) = run_onnx(tmp_path / "d.onnx", x=mixture()), detector(mixture())
    np.testing.assert_allclose(found["output_score"], output["score"].detach().numpy(), atol=1e-4)
    np.testing.assert_allclose(found["score"], decision.score.numpy(), atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("_onnx")
def test_keyword_inputs_and_masks_go_along(tmp_path):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm, self.fc = nn.Embedding(20, 4), nn.LayerNorm(4), nn.Linear(4, 2)

        def forward(self, input_ids, attention_mask):
            return self.fc(self.norm(self.embed(input_ids))[:, 0])

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 20, (60, 5), generator=generator)
    mask = (torch.arange(5) < torch.randint(1, 6, (60, 1), generator=generator)).long()
    detector = Detector(Words().eval(), scorer="average").fit({"input_ids": ids, "attention_mask": mask})
    one = {"input_ids": ids[:1], "attention_mask": mask[:1]}
    to_onnx(detector, tmp_path / "d.onnx", example_input=one)
    found = run_onnx(tmp_path / "d.onnx", input_ids=ids[:9], attention_mask=mask[:9])
    decision = detector.predict({"input_ids": ids[:9], "attention_mask": mask[:9]})
    np.testing.assert_allclose(found["score"], decision.score.numpy(), atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("_onnx")
def test_openvino_says_what_the_detector_says(tmp_path):
    openvino = pytest.importorskip("openvino")
    detector = Detector(make_trained(), scorer="average").fit(usual())
    to_onnx(detector, tmp_path / "d.onnx", input_shape=SHAPE)
    compiled = openvino.Core().compile_model(str(tmp_path / "d.onnx"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    x = mixture()
    result = compiled(x.numpy())
    found = {name: result[name] for name in names_of(detector)}
    assert_same(found, detector, x)


@pytest.mark.parametrize("case", CASES)
def test_pt2_says_what_the_detector_says(case, tmp_path):
    detector, x, extra = fit(case), mixture(), {METADATA_KEY: ""}
    names = to_pt2(detector, tmp_path / "d.pt2", input_shape=SHAPE, portable=True)
    program = torch.export.load(tmp_path / "d.pt2", extra_files=extra)
    found = {name: value.detach().numpy() for name, value in zip(names, program.module()(x), strict=True)}
    assert_same(found, detector, x)
    assert len(program.module()(x[:1])[1]) == 1
    assert json.loads(extra[METADATA_KEY])["calibration"]["threshold"] == detector.threshold


def test_a_model_that_takes_the_length_of_its_input_keeps_a_dynamic_batch(tmp_path):
    class Counts(Convolutions):
        def forward(self, image):
            return super().forward(image) + torch.zeros(len(image), 3)

    detector = Detector(Counts().eval(), scorer="average").fit(usual())
    to_pt2(detector, tmp_path / "d.pt2", input_shape=SHAPE, portable=True)
    score = torch.export.load(tmp_path / "d.pt2").module()(mixture())[1]
    torch.testing.assert_close(score, detector.score(mixture()))


def test_a_model_that_cannot_be_traced_is_said_to_be_so(tmp_path):
    class Branches(Convolutions):
        def forward(self, image):
            return super().forward(image) * (1 if float(image.sum()) > 0 else 2)

    detector = Detector(Branches().eval(), scorer="average").fit(usual())
    with pytest.raises(InputError, match=r"Expected Branches and its scorer to be a fixed graph .* branch on values"):
        to_pt2(detector, tmp_path / "d.pt2", input_shape=SHAPE, portable=True)


def test_the_model_and_its_mode_are_left_alone(tmp_path):
    model = make_trained()
    detector = Detector(model, scorer="average").fit(usual())
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    to_pt2(detector, tmp_path / "d.pt2", input_shape=SHAPE, portable=True)
    assert all(module.training for module in model.modules())
    assert count_hooks(model) == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_scorer_of_ones_own_goes_into_the_graph(tmp_path):
    class Largest:
        def fit(self, inliers, outliers=None):
            return self

        def score(self, vectors):
            return vectors.abs().amax(dim=1)

    detector = Detector(make_trained(), scorer=Largest()).fit(usual())
    to_pt2(detector, tmp_path / "d.pt2", input_shape=SHAPE, portable=True)
    score = torch.export.load(tmp_path / "d.pt2").module()(mixture())[1]
    torch.testing.assert_close(score, detector.score(mixture()))


def test_a_detector_without_threshold_is_refused(tmp_path):
    with pytest.raises(NotFittedError, match="Expected a fitted detector to export"):
        to_pt2(Detector(make_trained(), scorer="average"), tmp_path / "d.pt2", input_shape=SHAPE)
    assert not (tmp_path / "d.pt2").exists()


@pytest.mark.parametrize("options", [{}, {"example_input": usual(2), "input_shape": SHAPE}], ids=["none", "both"])
def test_exactly_one_description_of_the_input_is_wanted(options, tmp_path):
    detector = Detector(make_trained(), scorer="average").fit(usual())
    with pytest.raises(InputError, match="either `example_input` or `input_shape`"):
        to_pt2(detector, tmp_path / "d.pt2", **options)


def test_inputs_must_be_tensors(tmp_path):
    detector = Detector(make_trained(), scorer="average").fit(usual())
    with pytest.raises(InputError, match="Expected inputs that are tensors to export, but got str"):
        to_pt2(detector, tmp_path / "d.pt2", example_input={"x": usual(2), "mode": "fast"})


def test_a_missing_package_is_named_with_its_cure(monkeypatch, tmp_path):
    real = builtins.__import__

    def without_onnx(name, *args, **kwargs):
        if name == "onnx":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    detector = Detector(make_trained(), scorer="average").fit(usual())
    monkeypatch.setattr(builtins, "__import__", without_onnx)
    with pytest.raises(MissingExtraError, match=r"pip install neuralmean\[onnx\]"):
        to_onnx(detector, tmp_path / "d.onnx", input_shape=SHAPE)


def test_a_score_that_is_no_number_is_flagged_by_the_graph():
    detector = Detector(make_trained(), scorer="average").calibrate(usual())
    graph = DetectorGraph(detector, ("x",), 1)
    x = usual(3)
    x[1] = torch.nan
    _, score, p_value, is_ood, *_ = graph(x)
    assert score.isnan().tolist() == [False, True, False]
    assert is_ood[1]
    assert p_value[1] < 0.05


def test_a_model_elsewhere_than_on_the_cpu_is_not_exported(tmp_path, monkeypatch):
    detector = Detector(make_trained(), scorer="average").calibrate(usual())
    monkeypatch.setattr("neuralmean.export.writing.device_of", lambda modules: torch.device("cuda", 0))
    with pytest.raises(InputError, match="Expected a model on the CPU to export, but got one on cuda:0"):
        to_pt2(detector, tmp_path / "x.pt2", input_shape=SHAPE, portable=True)


def test_a_scorer_of_ones_own_with_exits_is_exported(tmp_path):
    class Own:
        def fit(self, inliers, outliers=None):
            pass

        def score(self, vectors):
            return vectors.abs().mean(1)

    detector = Detector(make_trained(), scorer=Own()).fit(usual(300), held_out=usual(100, 2), early_exit=True)
    to_pt2(detector, tmp_path / "x.pt2", input_shape=SHAPE, portable=True)
    module = torch.export.load(tmp_path / "x.pt2").module()
    torch.testing.assert_close(module(mixture())[1], detector.score(mixture()))


class Optional(nn.Module):
    """Returns what is there in training only, which is nothing."""

    def __init__(self, as_dict):
        super().__init__()
        self.inner, self.as_dict = make_trained(), as_dict

    def forward(self, x):
        logits = self.inner(x)
        return {"loss": None, "logits": logits} if self.as_dict else (logits, None)


@pytest.mark.parametrize("as_dict", [False, True])
def test_an_output_that_is_nothing_has_no_name(tmp_path, as_dict):
    detector = Detector(Optional(as_dict).eval(), scorer="average").calibrate(usual())
    names = to_pt2(detector, tmp_path / "x.pt2", input_shape=SHAPE, portable=True)
    assert names == ("logits" if as_dict else "output_0", "score", "p_value", "is_ood")


@pytest.mark.parametrize("apart", [0.0, 5.0], ids=["no clusters", "clusters"])
def test_a_model_without_classes_is_exported(tmp_path, apart):
    def images(n, seed):
        return usual(n, seed) + apart * (torch.arange(n) % 3).view(-1, 1, 1, 1)

    detector = Detector(make_trained(), head=False).fit(images(300, 1), held_out=images(100, 2))
    assert bool(len(detector.scorer.clusters_)) == bool(apart)
    to_pt2(detector, tmp_path / "x.pt2", input_shape=SHAPE, portable=True)
    module = torch.export.load(tmp_path / "x.pt2").module()
    for n in (3, 40):
        torch.testing.assert_close(module(mixture(n))[1], detector.score(mixture(n)), rtol=1e-4, atol=1e-4)


def test_an_example_that_the_model_cannot_take_is_told(tmp_path):
    detector = Detector(make_trained(), scorer="average").calibrate(usual())
    with pytest.raises(ModelInputError, match=r"Expected `input_shape` to be an input that TinyNet accepts"):
        to_pt2(detector, tmp_path / "x.pt2", input_shape=(4, 8, 8))
    with pytest.raises(ModelInputError, match=r"Expected `example_input` to be an input that TinyNet accepts"):
        to_pt2(detector, tmp_path / "x.pt2", example_input=torch.rand(2, 4, 8, 8))


def test_a_model_that_keeps_what_it_computed_is_told(tmp_path):
    model = make_trained()
    detector = Detector(model, scorer="average").calibrate(usual())
    model.kept = model.fc.weight * 2
    with pytest.raises(
        InputError, match=r"Expected a model that can be copied, but TinyNet holds a tensor that it computed"
    ):
        to_pt2(detector, tmp_path / "x.pt2", input_shape=SHAPE, portable=True)


def test_the_batch_has_its_name(tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    detector = Detector(make_trained(), scorer="average").calibrate(usual())
    to_onnx(detector, tmp_path / "x.onnx", input_shape=SHAPE)
    graph = onnx.load(tmp_path / "x.onnx").graph
    assert [value.type.tensor_type.shape.dim[0].dim_param for value in (graph.input[0], *graph.output)] == ["batch"] * 5


@pytest.mark.usefixtures("_onnx")
def test_the_alarm_rate_is_an_optional_input(tmp_path):
    import onnxruntime

    detector, x = fit("batch norm, logistic"), mixture(64)
    to_onnx(detector, tmp_path / "d.onnx", input_shape=SHAPE, check=mixture())
    session = onnxruntime.InferenceSession(tmp_path / "d.onnx")
    assert [value.name for value in session.get_inputs()] == ["x"]
    assert [value.name for value in session.get_overridable_initializers()] == ["alarm_rate"]
    score, p_value, is_ood = session.run(["score", "p_value", "is_ood"], {"x": x.numpy()})
    assert is_ood.tolist() == detector.predict(x).is_ood.tolist() == (p_value <= 0.05).tolist()
    flagged = session.run(["is_ood"], {"x": x.numpy(), "alarm_rate": np.array(0.99)})[0]
    assert flagged.tolist() == (p_value <= 0.99).tolist()
    assert flagged.sum() > is_ood.sum()
    assert score.shape == (64,)


@pytest.mark.usefixtures("_onnx")
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda name, value: value + 2e-3 if name == "score" else value, r"`score` differs \("),
        (lambda name, value: ~value if name == "is_ood" else value, "`is_ood` differs"),
        (lambda name, value: value + 0.01 if name == "p_value" else value, "`p_value` differs"),
        (lambda name, value: value * 1.01 if name == "output" else value, "`output` differs"),
        (lambda name, value: value[:1] if name == "score" else value, "`score` has the shape"),
    ],
)
def test_a_file_that_says_something_else_is_not_kept(tmp_path, monkeypatch, spoil, said):
    import onnxruntime

    detector, own = fit("batch norm, average"), onnxruntime.InferenceSession

    class Wrong(own):
        def run(self, names, feed, options=None):
            found = super().run(names, feed, options)
            return [spoil(output.name, value) for output, value in zip(self.get_outputs(), found, strict=True)]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Wrong)
    (tmp_path / "d.onnx").write_bytes(b"before")
    with pytest.raises(InputError, match=said + r".*No file was written"):
        to_onnx(detector, tmp_path / "d.onnx", input_shape=SHAPE)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("d.onnx", b"before")]


def test_a_detector_with_groups_is_not_exported(tmp_path):
    detector = Detector(make_trained(), scorer="average").calibrate(usual(), groups=["a", "b"] * 60)
    with pytest.raises(InputError, match="Expected a detector without groups to export"):
        to_pt2(detector, tmp_path / "x.pt2", input_shape=SHAPE, portable=True)


@pytest.mark.slow
def test_compiled_code_says_what_the_detector_says(tmp_path):
    detector, x = fit("batch norm, typicality"), mixture()
    names = to_pt2(detector, tmp_path / "d.pt2", input_shape=SHAPE, check=mixture())
    graph = torch._inductor.aoti_load_package(str(tmp_path / "d.pt2"))
    for size in (24, 1):
        found = dict(zip(names, graph(x[:size]), strict=True))
        torch.testing.assert_close(found["score"], detector.score(x[:size]), rtol=1e-4, atol=1e-4)
    assert_same({name: value.numpy() for name, value in zip(names, graph(x), strict=True)}, detector, x)
    header = json.loads(graph.get_metadata()[METADATA_KEY])
    assert header["calibration"]["threshold"] == detector.threshold
