from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from neuralmean.data.table import Blocks
from neuralmean.scorers.statistics import (
    Sketch,
    class_means,
    distinct_columns,
    explained_share,
    k_means,
    ledoit_wolf,
    low_rank,
    share_weights,
    shrink_means,
)


def test_repeated_and_constant_columns_are_dropped():
    rows = torch.randn(50, 4)
    table = torch.stack([rows[:, 0], rows[:, 1], rows[:, 0] + 3, torch.full((50,), 7.0), rows[:, 2], rows[:, 1]], dim=1)
    assert distinct_columns(Blocks(table)).tolist() == [0, 1, 4]


def test_columns_that_only_resemble_each_other_stay():
    rows = torch.randn(500, 1)
    table = torch.cat([rows, rows + 0.01 * torch.randn(500, 1)], dim=1)
    assert distinct_columns(Blocks(table)).tolist() == [0, 1]


def test_nothing_varies_in_constant_rows():
    assert len(distinct_columns(Blocks(torch.ones(10, 3)))) == 0
    assert len(distinct_columns(Blocks(torch.ones(10, 0)))) == 0


def test_class_means_by_hand():
    means, counts = class_means(Blocks(torch.tensor([[1.0], [3.0], [8.0]])), torch.tensor([0, 0, 2]), 3)
    assert means.tolist() == [[2.0], [4.0], [8.0]]  # the class without rows has the grand mean
    assert counts.tolist() == [2, 0, 1]


def test_the_explained_share_by_hand():
    rows = torch.tensor([[0.0], [2.0], [10.0], [12.0]]).double()
    classes = torch.tensor([0, 0, 1, 1])
    means, counts = class_means(Blocks(rows), classes, 2)
    within, share = explained_share(Blocks(rows), means, classes, counts)
    # Deviations within: 1 + 1 + 1 + 1 = 4; between: 25; overall: (4 / 4 + 25) * 4 / 3 = 104 / 3.
    # w^2 = (4 + 10 * 104 / 3) / (4 - 2 + 10) = 263 / 9; tau^2 = 25 - 263 / 9 / 4 = 637 / 36.
    assert within.item() == pytest.approx((263 / 9) ** 0.5)
    assert share.item() == pytest.approx(637 / 36 / (637 / 36 + 263 / 9))


def test_a_channel_that_fires_in_one_row_of_a_class_of_its_own_keeps_a_deviation():
    """Its deviation within classes is 0; the floor grows with the overall one and shrinks with the degrees of freedom."""
    rows = torch.zeros(100, 1).double()
    rows[0] = 5.0
    classes = torch.arange(100) // 2
    classes[0], classes[1] = 50, 51
    means, counts = class_means(Blocks(rows), classes, 52)
    within, _ = explained_share(Blocks(rows), means, classes, counts)
    assert within.item() == pytest.approx(rows.std().item() * (10 / (100 - 51 + 10)) ** 0.5)


def test_the_weights_of_columns_by_hand():
    # 10 rows more than classes: 10 * 0.5 + 10 = 15 and 10 * 0 + 10 = 10
    assert share_weights(torch.tensor([0.5, 0.0]), 10).tolist() == pytest.approx([0.6, 0.4])
    assert share_weights(torch.tensor([0.5, 0.0]), 0).tolist() == pytest.approx([0.5, 0.5])


def test_classes_that_are_alike_explain_nothing_on_average():
    generator = torch.Generator().manual_seed(0)
    rows, classes = torch.randn(400, 300, generator=generator).double(), torch.arange(400) % 20
    means, counts = class_means(Blocks(rows), classes, 20)
    assert explained_share(Blocks(rows), means, classes, counts)[1].mean() < 0.02


def test_shrinking_by_hand():
    means, centre = torch.tensor([[3.0], [-1.0]]).double(), torch.tensor([1.0]).double()
    # share 1/2 and within 1: tau^2 = 1; a mean of 4 rows is kept by 1 / (1 + 1/4), one of 1 row by 1/2
    shrunk = shrink_means(
        means, centre, torch.tensor([4, 1]), torch.tensor([1.0]).double(), torch.tensor([0.5]).double()
    )
    assert shrunk.flatten().tolist() == pytest.approx([1 + 2 * 0.8, 1 - 2 * 0.5])


@pytest.mark.parametrize("shape", [(500, 5), (30, 40), (200, 100)], ids=str)
def test_ledoit_wolf_equals_sklearn(shape):
    from sklearn.covariance import ledoit_wolf as peer

    rows = (
        torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()
        @ torch.randn(shape[1], shape[1]).double()
    )
    expected, _ = peer(rows.numpy(), assume_centered=True)
    np.testing.assert_allclose(ledoit_wolf(rows.split(13)).numpy(), expected, rtol=1e-9)


def test_low_rank_is_exact_where_the_rank_suffices_and_best_otherwise():
    matrix, counts = torch.randn(6, 40).double(), torch.tensor([4, 4, 4, 4, 4, 0])
    left, right = low_rank(matrix, counts, 10)
    torch.testing.assert_close((left @ right)[:5], matrix[:5])
    assert not left[5].any()  # a class without rows is at the grand mean
    left, right = low_rank(matrix[:5], counts[:5], 2)
    singular = torch.linalg.svdvals(matrix[:5])
    assert (left.shape, right.shape) == ((5, 2), (2, 40))
    assert (left @ right - matrix[:5]).square().sum().item() == pytest.approx(singular[2:].square().sum().item())


def test_classes_with_many_rows_are_approximated_best():
    matrix = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double()
    left, right = low_rank(matrix, torch.tensor([100, 1]), 1)
    torch.testing.assert_close(left @ right, torch.tensor([[1.0, 0.0], [0.0, 0.0]]).double())


def test_k_means_finds_clusters_that_are_there():
    generator = torch.Generator().manual_seed(0)
    places = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    rows = (places[:, None] + 0.1 * torch.randn(3, 50, 2, generator=generator)).reshape(-1, 2)
    centres = k_means(Blocks(rows), 3)
    torch.testing.assert_close(
        centres[centres[:, 0].argsort(stable=True)].sum(0), places.sum(0).double(), rtol=0, atol=0.1
    )
    assert torch.cdist(centres, places.double()).amin(1).max() < 0.1
    assert torch.equal(centres, k_means(Blocks(rows), 3))


def test_a_sketch_adds_signed_columns_up():
    rows = torch.tensor([[1.0, 2.0, 4.0]])
    assert Sketch.of(torch.tensor([0, 1, 0]), torch.tensor([1.0, 1.0, -1.0])).add_up(rows).tolist() == [[-3.0, 2.0]]
    assert Sketch.of(torch.arange(3), torch.ones(3)).add_up(rows) is rows


def test_a_sketch_is_a_loop_over_columns():
    generator = torch.Generator().manual_seed(0)
    bucket, sign = torch.randint(0, 7, (40,), generator=generator), torch.randn(40, generator=generator).sign()
    rows = torch.randn(5, 40, generator=generator)
    expected = torch.zeros(5, 7)
    for column in range(40):
        expected[:, bucket[column]] += sign[column] * rows[:, column]
    torch.testing.assert_close(Sketch.of(bucket, sign).add_up(rows), expected)


def test_a_sketch_is_exported_without_scattering():
    class Sketching(nn.Module):
        sketch = Sketch.of(torch.arange(20) % 7, torch.ones(20))

        def forward(self, rows):
            return self.sketch.add_up(rows)

    batch = torch.export.Dim("batch")
    program = torch.export.export(Sketching(), (torch.randn(3, 20),), dynamic_shapes=({0: batch},))
    used = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in used if "scatter" in name or "index_add" in name]
