import torch

from neuralmean.data.table import Blocks
from neuralmean.stats.size_trend import SizeTrend, range_of, size_edges


def test_ranges_cover_the_span_and_sizes_beyond_belong_to_the_ends():
    edges = size_edges(4.0, 64.0)
    assert edges[0] == 4.0
    torch.testing.assert_close(edges[-1].item(), 64.0)
    assert range_of(torch.tensor([1.0, 4.0, 63.0, 900.0]), edges).tolist() == [0, 0, 7, 7]


def test_one_size_makes_one_range():
    assert len(size_edges(12.0, 12.0)) == 2
    trend = SizeTrend.of(Blocks(torch.randn(100, 3)), torch.full((100,), 12.0), size_edges(12.0, 12.0))
    assert trend.mean.shape == (1, 3)


def test_what_is_standardised_by_its_trend_has_the_same_mean_and_spread_at_every_size():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp(torch.rand(8000, generator=generator, dtype=torch.float64) * 3)
    spread, middle = 4 / sizes, sizes.log() * 2 + 1
    rows = (torch.randn(8000, 2, generator=generator) * spread[:, None] + middle[:, None]).float()
    trend = SizeTrend.of(Blocks(rows), sizes, size_edges(1.0, float(torch.e) ** 3))
    standard = trend.standardised(rows, sizes)
    for part in sizes.argsort().chunk(10):
        assert standard[part].mean(dim=0).abs().max() < 0.15
        assert (standard[part].std(dim=0) - 1).abs().max() < 0.15


def test_a_column_that_does_not_vary_and_a_range_without_rows_give_finite_numbers():
    rows, sizes = torch.zeros(40, 2), torch.cat([torch.full((20,), 2.0), torch.full((20,), 50.0)])
    rows[:, 1] = torch.randn(40)
    trend = SizeTrend.of(Blocks(rows), sizes, size_edges(2.0, 50.0))
    assert bool(trend.standardised(rows, sizes).isfinite().all())
    assert bool(trend.standardised(torch.randn(3, 2), torch.tensor([10.0, 1.0, 90.0])).isfinite().all())
