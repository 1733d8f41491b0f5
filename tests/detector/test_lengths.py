"""Token models: inputs are compared with those of about their length, and the tokens share the score."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from neuralmean import Detector
from neuralmean.detector.groups import length_labels, length_ranges
from neuralmean.errors import InputError


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 16)
        self.norm = nn.LayerNorm(16)
        self.mix = nn.Linear(16, 16)
        self.last = nn.LayerNorm(16)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.last(torch.tanh(self.mix(self.norm(self.embedding(input_ids)))))


@pytest.fixture(scope="module")
def encoder() -> _Encoder:
    torch.manual_seed(0)
    return _Encoder().eval()


def _batches(count: int, seed: int, *, low: int = 1, high: int = 500) -> list[dict[str, Tensor]]:
    def each() -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count // 20):
            lengths = torch.exp(torch.rand(20, generator=generator) * 4).long() + 3
            mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
            yield {
                "input_ids": torch.randint(low, high, mask.shape, generator=generator) * mask,
                "attention_mask": mask,
            }

    return list(each())


@pytest.fixture(scope="module")
def fitted(encoder: _Encoder) -> Detector:
    return Detector(encoder, head=False).fit(_batches(1000, 1), held_out=_batches(2000, 2))


def _lengths(batches: list[dict[str, Tensor]]) -> Tensor:
    return torch.cat([batch["attention_mask"].sum(dim=1) for batch in batches])


def test_ranges_of_lengths_hold_about_as_many_examples_each() -> None:
    lengths = torch.exp(torch.rand(4000, generator=torch.Generator().manual_seed(0)) * 5).long().tolist()
    starts = length_ranges(lengths, 19)
    labels = length_labels(lengths, starts)
    assert starts[0] == 0
    assert len(starts) > 4
    assert min(labels.count(label) for label in set(labels)) >= 200
    assert length_ranges([7] * 1000, 19) == [0]
    assert length_ranges([], 19) == [0]


def test_the_false_alarm_rate_holds_for_short_and_for_long_inputs(fitted: Detector) -> None:
    fresh = _batches(4000, 3)
    decision = fitted.predict(fresh)
    assert fitted.learnt.grouped_by == "length"
    for rows in _lengths(fresh).argsort().chunk(4):
        assert 0.02 < decision.is_ood[rows].double().mean() < 0.09


def test_one_call_and_many_agree_and_so_does_a_loaded_detector(
    fitted: Detector, encoder: _Encoder, tmp_path: Any
) -> None:
    fresh = _batches(60, 4)
    decision = fitted.predict(fresh)
    each = torch.cat([fitted(**batch)[1].p_value for batch in fresh])
    assert torch.equal(decision.p_value, each)
    fitted.save(tmp_path / "model.nmd")
    loaded = Detector.load(tmp_path / "model.nmd", encoder)
    assert torch.equal(loaded.predict(fresh).p_value, decision.p_value)


def test_calibrating_again_keeps_the_ranges_and_so_does_another_rate(fitted: Detector, encoder: _Encoder) -> None:
    again = Detector(encoder, head=False).fit(_batches(400, 1), held_out=_batches(400, 5)).calibrate(_batches(2000, 2))
    assert again.learnt.grouped_by == "length"
    assert 0.05 < again.set_rate(0.1).predict(_batches(1000, 6)).is_ood.double().mean() < 0.15


def test_inputs_of_one_length_are_not_grouped(encoder: _Encoder) -> None:
    tokens = torch.randint(1, 40, (600, 12), generator=torch.Generator().manual_seed(0))
    detector = Detector(encoder, head=False).fit(tokens[:300], held_out=tokens[300:])
    assert detector.learnt.grouped_by is None


def test_a_model_of_images_has_no_lengths() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).eval()
    images = torch.rand(200, 1, 8, 8)
    detector = Detector(model).fit(images[:100], held_out=images[100:])
    assert detector.learnt.grouped_by is None
    with pytest.raises(InputError, match="Expected tokens with groups by length"):
        detector.calibrate(images, groups="length")


def test_each_token_has_its_share_of_the_score_and_padding_has_none(fitted: Detector) -> None:
    batches = _batches(40, 7)
    maps = fitted.locate(batches)
    lengths = _lengths(batches)
    assert maps.shape == (40, max(batch["input_ids"].shape[1] for batch in batches))
    padding = torch.arange(maps.shape[1]) >= lengths[:, None]
    assert maps[padding].abs().max() == 0
    torch.testing.assert_close(
        maps.sum(dim=1), fitted.explain(batches).by_layer.sum(dim=1).double(), rtol=1e-4, atol=1e-4
    )
