"""A norm and a ReLU as one comparison, worked out by hand and beside the plain formula."""

import numpy as np
import pytest

from neuralmean.clamping import to_clamp


def test_bounds_scale_and_shift_of_channels_that_rise_fall_and_stay():
    # 2x + 4 > 0 above -2; -x + 3 > 0 below 3; 0x + 5 is 5; 0x - 5 is 0 behind the ReLU
    clamp = to_clamp(np.array([2.0, -1.0, 0.0, 0.0]), np.array([4.0, 3.0, 5.0, -5.0]))
    assert clamp.lower.tolist() == [-2, -np.inf, 0, 0]
    assert clamp.upper.tolist() == [np.inf, 3, 0, 0]
    assert clamp.scale.tolist() == [2, -1, 0, 0]
    assert clamp.shift.tolist() == [4, 3, 5, 0]
    assert (clamp.rises, clamp.falls) == (True, True)


def test_it_is_the_norm_and_the_relu():
    random = np.random.default_rng(0)
    scale, shift, x = random.normal(size=(3, 50))
    scale[:3], shift[3:6] = 0, 0
    clamp = to_clamp(scale, shift)
    found = clamp.scale * np.clip(x, clamp.lower, clamp.upper) + clamp.shift
    assert found == pytest.approx(np.maximum(scale * x + shift, 0), abs=1e-12)


@pytest.mark.parametrize("bias", [None, np.array([10.0])], ids=["no bias", "bias"])
def test_a_convolution_takes_scale_and_shift_in(bias):
    clamp = to_clamp(np.array([2.0, 3.0]), np.array([1.0, -1.0]))
    weight, found = clamp.into(np.array([[[[5.0]], [[7.0]]]]), bias)
    assert weight.tolist() == [[[[10.0]], [[21.0]]]]
    assert found.tolist() == [5 * 1 - 7 * 1 + (0 if bias is None else 10)]
