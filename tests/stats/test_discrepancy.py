from __future__ import annotations

import pytest
import torch

from neuralmean.errors import InputError
from neuralmean.models.layers import Layer
from neuralmean.recording.reference import Reference
from neuralmean.stats.discrepancy import check_statistic, discrepancy, pool_batch, scale_of, vector_layers, vector_names
from neuralmean.stats.moments import Moments

LAYERS = (Layer("a", "batchnorm", 1), Layer("b", "batchnorm", 2))
REFERENCE = Reference(LAYERS, torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([1.0, 1.0, 2.0]).double())
MEANS, VARIANCES = torch.tensor([[1.5, 0.0, 3.0]]), torch.tensor([[4.0, 0.0, 9.0]])


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [("mean", [0.5, -2.0, 0.0]), ("variance", [1.0, -1.0, 1.0]), ("both", [0.5, -2.0, 0.0, 1.0, -1.0, 1.0])],
)
def test_the_numbers_by_hand(statistic, expected):
    assert discrepancy(MEANS, VARIANCES, REFERENCE, statistic).tolist() == [expected]
    assert len(vector_names(LAYERS, statistic)) == len(vector_layers(LAYERS, statistic)) == len(expected)


def test_columns_are_named():
    assert vector_names(LAYERS, "both") == ["a[0]", "b[0]", "b[1]", "a[0].std", "b[0].std", "b[1].std"]
    assert vector_layers(LAYERS, "both").tolist() == [0, 1, 1, 0, 1, 1]


def test_a_batch_is_pooled_as_one_heap_of_activations():
    activation = torch.randn(5, 3, 4, 4).double()
    means, variances = activation.mean((2, 3)), activation.var((2, 3), correction=0)
    pooled_mean, pooled_variance = pool_batch(means, variances)
    heap = activation.transpose(0, 1).flatten(1)
    torch.testing.assert_close(pooled_mean[0], heap.mean(1))
    torch.testing.assert_close(pooled_variance[0], heap.var(1, correction=0))
    assert pool_batch(means, None)[1] is None


def test_variances_need_a_reference_with_deviations():
    with pytest.raises(InputError, match="Expected a reference with standard deviations for `statistic='variance'`"):
        discrepancy(MEANS, VARIANCES, Reference(LAYERS, REFERENCE.mean, None), "variance")


def test_an_unknown_statistic_is_an_error():
    with pytest.raises(InputError, match="Expected `statistic` to be 'mean', 'variance' or 'both', but got 'median'"):
        check_statistic("median")


def test_a_column_that_hardly_varies_does_not_outweigh_the_others():
    rows = torch.randn(100, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 2.0, 0.0])
    scale = scale_of(Moments.of(rows))
    torch.testing.assert_close(scale[:2], rows[:, :2].double().std(0, correction=0))
    assert scale[2] == pytest.approx(1e-3 * rows.double().std(0, correction=0).mean().item())
    assert (scale_of(Moments.of(torch.ones(4, 2))) > 0).all()
