import pytest
import torch
from torch import Tensor

from neuralmean.errors import InputError
from neuralmean.stats.regions import box_side, cell_weights, check_corners, clip_boxes, random_boxes


def _reference_box_mean(activation: Tensor, box: list[float], size: tuple[int, int], steps: int = 24) -> Tensor:
    """Enlarge the cells to a fine raster and average what lies in the box."""
    fine = activation.repeat_interleave(size[0] * steps // activation.shape[1], dim=1)
    fine = fine.repeat_interleave(size[1] * steps // activation.shape[2], dim=2)
    x0, y0, x1, y1 = (round(value * steps) for value in box)
    return fine[:, y0:y1, x0:x1].mean(dim=(1, 2))


@pytest.mark.parametrize("cells", [(8, 8), (4, 2), (2, 8), (1, 1)])
def test_the_mean_in_a_box_is_that_of_the_pixels_that_the_cells_stand_for(cells):
    generator = torch.Generator().manual_seed(0)
    activation = torch.randn(3, *cells, generator=generator, dtype=torch.float64)
    for box in ([0, 0, 8, 8], [1, 2, 3, 7], [2.5, 0.25, 2.75, 8.0], [6.5, 6.5, 7.5, 7.5]):
        weights = cell_weights(torch.tensor([box], dtype=torch.float64), cells, (8, 8))
        torch.testing.assert_close(
            (activation.flatten(1) @ weights.T)[:, 0], _reference_box_mean(activation, box, (8, 8))
        )


def test_the_weights_of_a_box_add_up_to_one():
    boxes = random_boxes(torch.rand(200) * 30 + 1, (40, 24), generator=torch.Generator().manual_seed(0))
    for cells in ((40, 24), (7, 5), (1, 3)):
        torch.testing.assert_close(
            cell_weights(boxes, cells, (40, 24)).sum(dim=1), torch.ones(200, dtype=torch.float64)
        )


def test_drawn_boxes_lie_in_the_image_and_have_the_side_asked_for():
    sides = torch.linspace(1, 50, 300, dtype=torch.float64)
    boxes = random_boxes(sides, (30, 60), generator=torch.Generator().manual_seed(1))
    assert bool((boxes[:, :2] >= -1e-9).all())
    assert bool((boxes[:, 2:] <= torch.tensor([60.0, 30.0]) + 1e-9).all())
    fits = sides <= (30 * 60) ** 0.5
    torch.testing.assert_close(box_side(boxes)[fits], sides[fits])
    assert box_side(boxes).max() <= (30 * 60) ** 0.5 + 1e-9


def test_boxes_are_cut_to_the_image_and_at_least_a_pixel_wide():
    boxes = clip_boxes(torch.tensor([[-3.0, -3.0, 4.0, 4.0], [31.9, 5.0, 32.0, 9.0], [3.0, 3.0, 3.0, 3.0]]), (32, 32))
    assert boxes.tolist() == [[0, 0, 4, 4], [31, 5, 32, 9], [2.5, 2.5, 3.5, 3.5]]


@pytest.mark.parametrize("box", [[5.0, 0.0, 1.0, 3.0], [0.0, float("nan"), 1.0, 3.0]])
def test_numbers_that_are_no_corners_are_refused(box):
    with pytest.raises(InputError, match="x0 <= x1 and y0 <= y1, but box 1 is"):
        check_corners(torch.tensor([[0.0, 0.0, 1.0, 1.0], box]))


def test_a_box_outside_of_the_image_is_refused():
    with pytest.raises(InputError, match="meet the image of 8 x 6 pixels, but box 0 is 9, 0, 12, 3"):
        clip_boxes(torch.tensor([[9.0, 0.0, 12.0, 3.0]]), (6, 8))


def test_boxes_of_another_shape_are_refused():
    with pytest.raises(InputError, match=r"shape \(M, 4\)"):
        check_corners(torch.zeros(4))
