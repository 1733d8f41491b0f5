from __future__ import annotations

import torch

from neuralmean.data.probes import are_close, natural_looking, noise, odd_inputs


def test_probes_have_the_shape_of_the_inputs_and_are_the_same_every_time():
    x = torch.rand(20, 3, 8, 8)
    first, second = list(odd_inputs(x)), list(odd_inputs(x))
    assert all(probe.shape[1:] == x.shape[1:] and probe.dtype == x.dtype for probe in first)
    assert {len(probe) for probe in first} == {1, 2, 3, 5, 8, 17}
    assert all(map(torch.equal, first, second))
    assert all(probe.max() < 5 for probe in odd_inputs(torch.randint(0, 5, (3, 7))))  # token ids stay token ids


def test_natural_looking_images_have_the_spectrum_of_photographs():
    images = natural_looking(noise(64, torch.zeros(1, 1, 32, 32)))
    power = torch.fft.rfft2(images).abs().square().mean((0, 1))
    ratio = power[2, 2] / power[8, 8]  # four times the frequency: a sixteenth of the power
    assert 12 < ratio < 20
    torch.testing.assert_close(images.std(dim=(1, 2, 3)), torch.ones(64), rtol=1e-4, atol=0)


def test_close_is_relative_to_the_largest_number():
    one = torch.tensor([1000.0, 0.0])
    assert are_close(one, one + 5e-3)
    assert not are_close(one, one + 5e-2)
    assert not are_close(one, one.double())
    assert not are_close(one, one[:1])
    assert are_close(None, None)
    assert not are_close(None, one)
    assert are_close(torch.tensor([torch.nan, 1]), torch.tensor([torch.nan, 1]))
    assert not are_close(torch.tensor([True]), torch.tensor([False]))
