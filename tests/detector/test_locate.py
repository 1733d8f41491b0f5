from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from neuralmean import Detector
from neuralmean.bench import models
from neuralmean.errors import CalibrationWarning, InputError, NotFittedError


def _fitted(model, shape=(3, 16, 16), n=100, **options):
    data = torch.randn(n, *shape, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        return Detector(model, **options).fit(data)


def _net():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    net.train()
    for _ in range(20):
        net(torch.randn(32, 3, 16, 16))
    return net.eval()


@pytest.mark.parametrize("scorer", [None, "average", "logistic", "mlp"])
@pytest.mark.parametrize("statistic", ["mean", "variance", "both"])
def test_the_map_of_a_layer_adds_up_to_its_contribution(scorer, statistic):
    detector = _fitted(_net(), scorer=scorer, statistic=statistic)
    x = torch.randn(5, 3, 16, 16)
    maps, explained = detector.locate(x, by_layer=True, batch_size=2), detector.explain(x)
    assert maps.shape == (5, 2, 16, 16)
    torch.testing.assert_close(maps.sum(dim=(2, 3)).float(), explained.by_layer.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(detector.locate(x, batch_size=2), maps.sum(dim=1), atol=1e-6, rtol=1e-5)


def test_the_strange_place_stands_out():
    detector = _fitted(_net())
    x = torch.randn(1, 3, 16, 16) * 0.5
    x[:, :, 2:7, 9:14] += 9.0
    row, column = divmod(detector.locate(x)[0].argmax().item(), 16)
    assert 2 <= row < 7
    assert 9 <= column < 14


def test_a_layer_after_the_pooling_is_spread_evenly():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(8), nn.Linear(8, 4)
    )
    for _ in range(20):
        net.train()(torch.randn(32, 3, 16, 16))
    detector, x = _fitted(net.eval()), torch.randn(3, 3, 16, 16)
    maps = detector.locate(x, by_layer=True)
    torch.testing.assert_close(maps.sum(dim=(2, 3)).float(), detector.explain(x).by_layer.float(), atol=1e-5, rtol=1e-5)
    assert maps[:, 1].flatten(1).std(dim=1).max() < 1e-6


def test_the_model_is_left_as_it_was():
    net = _net().train()
    x = torch.randn(2, 3, 16, 16)
    detector = Detector(net)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    detector.locate(x)
    assert net.training
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_patches_of_a_vision_transformer_are_put_on_the_image():
    torch.manual_seed(0)
    detector = _fitted(models.build("vit"), shape=(3, 32, 32))
    x = torch.randn(2, 3, 32, 32)
    maps = detector.locate(x, by_layer=True)
    assert maps.shape == (2, len(detector.layers), 32, 32)
    torch.testing.assert_close(maps.sum(dim=(2, 3)).float(), detector.explain(x).by_layer.float(), atol=1e-4, rtol=1e-5)
    assert maps[0, 0].std() > 0


class _Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(30, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask):
        hidden = self.norm(self.embedding(input_ids))
        weight = attention_mask.unsqueeze(-1)
        return self.head((hidden * weight).sum(1) / weight.sum(1))


def test_tokens_have_a_share_each_and_padding_has_none():
    torch.manual_seed(0)
    ids, mask = torch.randint(0, 30, (120, 7)), torch.ones(120, 7, dtype=torch.int64)
    mask[:, 5:] = 0
    with pytest.warns(CalibrationWarning):
        detector = Detector(_Words().eval(), layers="norm").fit({"input_ids": ids, "attention_mask": mask})
    inputs = {"input_ids": ids[:4], "attention_mask": mask[:4]}
    maps = detector.locate(inputs)
    assert maps.shape == (4, 7)
    assert not maps[:, 5:].any()
    torch.testing.assert_close(
        maps.sum(dim=1).float(), detector.explain(inputs).by_layer.sum(dim=1), atol=1e-5, rtol=1e-5
    )


class _Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x):
        fine = self.conv(x)
        fine, coarse = self.norm(fine), self.norm(nn.functional.avg_pool2d(fine, 2))
        return self.head(fine.mean((2, 3)) + coarse.mean((2, 3)))


def test_a_layer_that_runs_twice_is_split_over_both_runs():
    torch.manual_seed(0)
    net = _Twice().train()
    net(torch.randn(64, 3, 8, 8))
    detector = _fitted(net.eval(), shape=(3, 8, 8))
    x = torch.randn(3, 3, 8, 8)
    maps = detector.locate(x, by_layer=True)
    torch.testing.assert_close(maps.sum(dim=(2, 3)).float(), detector.explain(x).by_layer.float(), atol=1e-5, rtol=1e-5)


def test_inputs_without_positions_are_an_error():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    detector = _fitted(net, shape=(4,))
    with pytest.raises(InputError, match="inputs with positions"):
        detector.locate(torch.randn(2, 4))


def test_images_of_several_sizes_are_an_error():
    with pytest.raises(InputError, match="images of one size"):
        Detector(_net()).locate([torch.randn(3, 16, 16), torch.randn(3, 8, 8)])


def test_a_detector_without_a_reference_is_an_error():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    with pytest.raises(NotFittedError, match="no reference yet"):
        Detector(net).locate(torch.randn(1, 3, 8, 8))
