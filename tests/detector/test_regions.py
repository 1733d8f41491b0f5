"""Regions: p-values of boxes, from boxes of held-out images of the same size range."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from neuralmean import Detector
from neuralmean.errors import ArtefactError, InputError, NotFittedError
from neuralmean.files.artefact import Artefact
from neuralmean.stats.metrics import evaluate
from neuralmean.stats.regions import random_boxes

PATCH = [6.0, 4.0, 14.0, 12.0]


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.BatchNorm2d(12), nn.ReLU()]
    layers += [nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4))
    for _ in range(20):
        model(_images(64, 0))  # in place of training
    return model.eval()


def _images(count: int, seed: int, size: tuple[int, int] = (24, 24)) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 6, 6, generator=generator)
    return nn.functional.interpolate(coarse, size=size, mode="bilinear") + 0.1 * torch.randn(
        count, 3, *size, generator=generator
    )


def _pasted(images: Tensor) -> Tensor:
    x0, y0, x1, y1 = map(int, PATCH)
    pasted = images.clone()
    pasted[:, :, y0:y1, x0:x1] = 2 * torch.randn(
        len(images), 3, y1 - y0, x1 - x0, generator=torch.Generator().manual_seed(9)
    )
    return pasted


@pytest.fixture(scope="module")
def fitted() -> Detector:
    return Detector(_network(), scorer="average").fit(_images(400, 1), held_out=_images(300, 2), regions=True)


def _boxes(count: int) -> Tensor:
    return torch.tensor([PATCH, [14.0, 14.0, 22.0, 22.0]]).expand(count, 2, 4)


def test_a_patch_that_does_not_belong_is_told_from_the_rest_of_the_image(fitted: Detector) -> None:
    found = fitted.score_regions(_pasted(_images(100, 3)), _boxes(100))
    assert found.p_value.shape == found.is_ood.shape == (100, 2)
    assert evaluate(found.score[:, 1], found.score[:, 0]).auroc > 99
    assert found.is_ood[:, 0].double().mean() > 0.9


@pytest.mark.parametrize("side", [4.5, 8.0, 13.0, 21.0])
def test_boxes_anywhere_in_fresh_images_are_flagged_as_often_as_asked(fitted: Detector, side: float) -> None:
    fresh, generator = _images(800, 4), torch.Generator().manual_seed(0)
    boxes = random_boxes(torch.full((800,), side), (24, 24), generator=generator)[:, None]
    assert 0.02 < fitted.score_regions(fresh, boxes).is_ood.double().mean() < 0.09


def test_the_output_is_the_models_own_and_each_image_has_a_decision(fitted: Detector) -> None:
    x = _images(3, 5)
    boxes = [torch.tensor([PATCH]), torch.zeros(0, 4), torch.tensor([PATCH, [0.0, 0.0, 24.0, 24.0]])]
    found = fitted.score_regions(x, boxes)
    assert torch.equal(found.output, fitted.model(x))
    assert [len(decision) for decision in found] == [1, 0, 2]
    assert torch.equal(found[2].p_value, found.p_value[2])
    assert torch.equal(found.decision.score, torch.cat(found.score))
    assert found[-1].p_value[1] == found.p_value[2][1]


def test_boxes_may_come_out_of_the_models_output_in_the_same_pass(fitted: Detector) -> None:
    x, calls = _images(4, 6), []
    handle = fitted.model.register_forward_hook(lambda *_: calls.append(1))
    try:
        found = fitted.score_regions(x, lambda output: list(_boxes(len(output))))
    finally:
        handle.remove()
    assert len(calls) == 1
    expected = fitted.score_regions(x, _boxes(4)).score
    torch.testing.assert_close(torch.stack(found.score), expected)


def test_a_box_around_the_whole_image_has_the_channel_means_of_the_image(fitted: Detector) -> None:
    from neuralmean.data.batch import to_batch
    from neuralmean.detector.region_boxes import Given, read_boxes

    x = _images(5, 7)
    recorder = fitted._observer.recorder
    boxes = torch.tensor([[0.0, 0.0, 24.0, 24.0]]).expand(5, 1, 4)
    _, _, rows = read_boxes(recorder, fitted.model, to_batch(x), Given(boxes))
    torch.testing.assert_close(rows.means, recorder(to_batch(x)).mean[:, : 8 + 12], rtol=1e-5, atol=1e-5)
    assert rows.side.tolist() == [24.0] * 5


def test_no_hook_is_left(fitted: Detector) -> None:
    with pytest.raises(ZeroDivisionError):
        fitted.score_regions(_images(2, 8), lambda output: [1 / 0])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in fitted.model.modules())


def test_regions_survive_saving(fitted: Detector, tmp_path: Any) -> None:
    fitted.save(tmp_path / "model.nmd")
    loaded = Detector.load(tmp_path / "model.nmd", _network())
    x = _pasted(_images(20, 9))
    expected, found = fitted.score_regions(x, _boxes(20)), loaded.score_regions(x, _boxes(20))
    assert torch.equal(found.p_value, expected.p_value)
    assert torch.equal(found.score, expected.score)


@pytest.mark.parametrize(
    "name", ["regions.edges_", "regions.mean_", "regions.whiten_", "regions.groups", "regions.scores"]
)
def test_a_file_whose_regions_do_not_fit_together_is_refused(fitted: Detector, tmp_path: Any, name: str) -> None:
    fitted.save(tmp_path / "model.nmd")
    artefact = Artefact.read(tmp_path / "model.nmd")
    tensors = {**artefact.tensors, name: artefact.tensors[name].flip(0)[1:].contiguous()}
    Artefact({key: value for key, value in artefact.header.items() if key != "digest"}, tensors).write(
        tmp_path / "bad.nmd"
    )
    with pytest.raises(ArtefactError, match="content is invalid"):
        Detector.load(tmp_path / "bad.nmd", _network())


def test_a_detector_that_has_not_learnt_regions_says_so() -> None:
    detector = Detector(_network(), scorer="average").calibrate(_images(50, 1))
    with pytest.raises(NotFittedError, match="regions=True"):
        detector.score_regions(_images(1, 1), _boxes(1))


def test_regions_need_held_out_images() -> None:
    with pytest.raises(InputError, match="`held_out` images with `regions`"):
        Detector(_network(), scorer="average").fit(_images(50, 1), regions=True)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        (torch.zeros(1, 4), r"shape \(N, M, 4\), or a list"),
        ([torch.zeros(1, 4)], "each of the 2 images, but got them for 1"),
        ([torch.tensor([[5.0, 5.0, 2.0, 2.0]])] * 2, "x0 <= x1"),
        ([torch.tensor([[50.0, 5.0, 52.0, 6.0]])] * 2, "meet the image of 24 x 24"),
    ],
)
def test_boxes_that_are_none_are_refused(fitted: Detector, boxes: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fitted.score_regions(_images(2, 1), boxes)


def test_the_map_of_a_layer_is_small_where_something_does_not_belong(fitted: Detector) -> None:
    x = _pasted(_images(40, 10))
    p_values = fitted.region_map(x, layer="4", window=6)
    assert p_values.shape == (40, 12, 12)
    inside = p_values[:, 3:5, 4:6].mean()
    assert inside < 0.05 < p_values[:, 8:, 8:].mean()
    window = torch.tensor([[6.0, 4.0, 12.0, 10.0]]).expand(40, 1, 4)  # around the cell in row 3, column 4
    torch.testing.assert_close(p_values[:, 3, 4], fitted.score_regions(x, window).p_value[:, 0])


def test_the_layer_of_a_map_must_be_watched(fitted: Detector) -> None:
    with pytest.raises(InputError, match="watched layer with positions, such as '1', '4', '7', but got '2'"):
        fitted.region_map(_images(1, 1), layer="2")


class _Stub(nn.Module):
    """A detection model: a list of images in, boxes out; it finds what is brightest."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = _network()[:9]

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        features = self.backbone(torch.stack(images))
        found = []
        for row in features.square().sum(dim=1):
            y, x = divmod(int(row.argmax()), row.shape[1])
            middle = torch.tensor([2.0 * x + 1, 2.0 * y + 1])
            found.append({"boxes": torch.cat([middle - 4, middle + 4])[None], "labels": torch.zeros(1)})
        return found


def test_a_detection_model_takes_a_list_of_images_and_its_boxes_get_p_values() -> None:
    def boxes(output: list[dict[str, Tensor]]) -> list[Tensor]:
        return [own["boxes"] for own in output]

    model = _Stub().eval()
    detector = Detector(model, scorer="average", head=False)
    batches = [list(part) for part in _images(400, 1).split(20)]
    held = [list(part) for part in _images(300, 2).split(20)]
    detector.fit(batches, held_out=held).fit_regions(batches, held, boxes=boxes)
    clean = detector.score_regions(list(_images(60, 11)), boxes)
    strange = detector.score_regions(list(_pasted(_images(60, 11))), boxes)
    assert [decision.p_value.shape for decision in strange] == [(1,)] * 60
    assert clean.decision.is_ood.double().mean() < 0.15
    assert strange.decision.is_ood.double().mean() > 0.7


def test_images_of_different_sizes_need_a_model_that_says_where_it_places_them() -> None:
    model = _Stub().eval()
    detector = Detector(model, scorer="average", head=False)
    data = [list(_images(60, 1))]
    detector.fit(data, held_out=[list(_images(60, 2))]).fit_regions(data, [list(_images(60, 2))])
    with pytest.raises(InputError, match="one image at a time"):
        detector.score_regions([_images(1, 1)[0], _images(1, 1, (30, 30))[0]], [torch.tensor([PATCH])] * 2)


class _Canvas(nn.Module):
    """Doubles each image and puts all on one canvas, as the transform of torchvision's detection models does."""

    size_divisible = 32

    def forward(self, images: list[Tensor]) -> tuple[Any, None]:
        large = [nn.functional.interpolate(own[None], scale_factor=2.0)[0] for own in images]
        height, width = (max(own.shape[dim] for own in large) for dim in (1, 2))
        canvas = torch.zeros(len(large), 3, height, width)
        for place, own in zip(canvas, large, strict=True):
            place[:, : own.shape[1], : own.shape[2]] = own
        sizes = [tuple(own.shape[1:]) for own in large]
        return type("ImageList", (), {"tensors": canvas, "image_sizes": sizes}), None


def test_boxes_follow_the_images_to_where_the_model_resizes_and_places_them() -> None:
    from neuralmean.data.batch import to_batch
    from neuralmean.detector.region_boxes import frames_of
    from neuralmean.recording import Recorder

    model = nn.Module()
    model.transform = _Canvas()  # type: ignore[assignment]
    recorder = Recorder(model, [])
    frames = frames_of(recorder, to_batch([torch.zeros(3, 10, 20), torch.zeros(3, 16, 12)]), model)
    assert [frame.canvas for frame in frames] == [(32, 40), (32, 40)]
    assert frames[0].place(torch.tensor([[1.0, 2.0, 5.0, 10.0]])).tolist() == [[2.0, 4.0, 10.0, 20.0]]
    assert frames[1].unplace(torch.tensor([[2.0, 4.0, 10.0, 20.0]])).tolist() == [[1.0, 2.0, 5.0, 10.0]]
