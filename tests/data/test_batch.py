from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from neuralmean.data.batch import check_input, count_batches, count_rows, to_batch, to_batches
from neuralmean.errors import InputError

X = torch.arange(10.0).reshape(5, 2)
Y = torch.arange(5)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


@pytest.mark.parametrize(
    "data",
    [
        X,
        X.numpy(),
        X.double().numpy(),
        (X, Y),
        {"x": X},
        TensorDataset(X, Y),
        TensorDataset(X),
        Stream(),
        DataLoader(TensorDataset(X, Y), batch_size=2),
        [X[:2], X[2:]],
        [(X[:2], Y[:2]), (X[2:], Y[2:])],
        [{"x": X}],
        (batch for batch in [X]),
    ],
    ids=[
        "tensor",
        "array",
        "float64",
        "pair",
        "dict",
        "dataset",
        "dataset1",
        "stream",
        "loader",
        "list",
        "pairs",
        "dicts",
        "generator",
    ],
)
def test_every_kind_of_data_gives_the_same_rows(data):
    batches = list(to_batches(data, batch_size=2))
    torch.testing.assert_close(torch.cat([batch.first for batch in batches]), X)
    assert sum(map(len, batches)) == 5


def test_a_dict_is_cut_into_rows_and_other_values_stay():
    batches = list(to_batches({"x": X, "attention_mask": X > 3, "flag": True}, batch_size=4))
    assert [len(batch) for batch in batches] == [4, 1]
    assert batches[1].kwargs["flag"] is True
    assert batches[1].mask.tolist() == [[True, True]]


def test_batches_are_counted_where_that_is_possible():
    assert count_batches(X, batch_size=2) == 3
    assert count_batches(TensorDataset(X), batch_size=2) == 3
    assert count_batches(DataLoader(TensorDataset(X), batch_size=4)) == 2
    assert count_batches(iter([X])) is None
    assert count_batches(Stream()) is None


@pytest.mark.parametrize(
    "empty", [X[:0], [], np.zeros((0, 3)), TensorDataset(X[:0])], ids=["tensor", "list", "array", "dataset"]
)
def test_empty_data_is_an_error(empty):
    with pytest.raises(InputError, match="Expected `id_data` to hold at least one example, but it is empty"):
        list(to_batches(empty, name="id_data"))


@pytest.mark.parametrize("data", [3, None, torch.tensor(1.0)], ids=["int", "none", "scalar"])
def test_data_of_another_kind_is_an_error(data):
    with pytest.raises(InputError, match="Expected `id_data` to be a tensor, an array, a DataFrame, a DataLoader"):
        list(to_batches(data, name="id_data"))


def test_a_path_points_to_the_image_reader():
    with pytest.raises(InputError, match="To read images from a folder"):
        list(to_batches("photos/"))


def test_a_batch_of_another_kind_is_an_error():
    with pytest.raises(
        InputError, match=re.escape("Expected a batch to be x, (x, y) or a dict of inputs, but got str 'a'")
    ):
        to_batch("a")


def test_a_batch_without_a_tensor_is_an_error():
    with pytest.raises(InputError, match="Expected a batch that holds a tensor"):
        len(to_batch({"a": 1}))


def test_an_array_of_objects_is_an_error():
    with pytest.raises(InputError, match="dtype object"):
        to_batch(np.array([None]))


def test_labels_are_noticed():
    with pytest.raises(InputError, match=r"but got shape \(5,\) of torch.int64. Are these labels"):
        check_input(to_batch(Y), "id_data")


def test_integer_images_are_noticed():
    with pytest.raises(InputError, match=r"Expected `x` to hold floats, prepared as for training, but got torch.uint8"):
        check_input(to_batch(torch.zeros(2, 3, 4, 4, dtype=torch.uint8)), "x")


def test_a_token_model_may_take_integers():
    check_input(to_batch(torch.zeros(2, 7, dtype=torch.int64)), "x", tokens=True)


def test_rows_are_counted_whatever_the_batches():
    x = torch.zeros(10, 3)
    dataset = TensorDataset(x)
    batches = [x[:4], x[4:]]
    sampler = BatchSampler(SequentialSampler(dataset), batch_size=2, drop_last=False)
    assert count_rows(x) == count_rows((x, torch.zeros(10))) == count_rows({"x": x}) == 10
    assert count_rows(dataset) == count_rows(batches) == count_rows([(batch, batch) for batch in batches]) == 10
    assert count_rows(DataLoader(dataset, batch_size=5)) == count_rows(DataLoader(dataset, batch_sampler=sampler)) == 10
    assert count_rows(DataLoader(dataset, batch_size=4)) == 12  # the last batch may be a full one
    assert count_rows(iter(batches)) is None
    assert count_rows(DataLoader(Stream(), batch_size=None)) is None
    assert count_rows(DataLoader(batches, batch_size=None)) is None
    assert count_rows(3) is None


def test_a_sampler_of_some_rows_counts_these():
    dataset = TensorDataset(torch.zeros(500, 3))
    some = BatchSampler(SequentialSampler(range(20)), batch_size=8, drop_last=False)
    assert count_rows(DataLoader(dataset, batch_sampler=some)) == 24
    assert count_rows(DataLoader(dataset, batch_sampler=[[0, 1], [2]])) is None


@pytest.mark.parametrize("array", [np.array(["a"]), np.zeros(3, ">f4"), np.zeros(3, "datetime64[s]")])
def test_an_array_that_torch_does_not_have_is_told(array):
    with pytest.raises(InputError, match="Expected an array of a type that torch supports, but got one of dtype"):
        to_batch(array)


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_frame_gives_its_rows(package):
    frame = pytest.importorskip(package).DataFrame({"a": [1.5, 2.5, 3.5], "b": [1, 2, 3], "c": [True, False, True]})
    batches = list(to_batches(frame, batch_size=2))
    expected = torch.tensor([[1.5, 1, 1], [2.5, 2, 0], [3.5, 3, 1]])
    assert [len(batch) for batch in batches] == [2, 1]
    torch.testing.assert_close(torch.cat([batch.first for batch in batches]), expected)
    torch.testing.assert_close(to_batch((frame, [0, 1, 0])).first, expected)


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_frame_with_texts_names_the_column(package):
    frame = pytest.importorskip(package).DataFrame({"a": [1.5], "town": ["Jena"]})
    with pytest.raises(InputError, match="Expected a DataFrame of numbers, but column 'town' holds"):
        to_batch(frame)


def test_images_of_different_sizes_stay_a_list():
    images = [torch.rand(3, 4 + i, 5) for i in range(5)]
    batches = list(to_batches(images, batch_size=2))
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert batches[0].args == (images[:2],)
    targets = [{"boxes": torch.zeros(0, 4)}] * 5
    assert to_batch((tuple(images), tuple(targets))).images == images  # as torchvision's examples collate
    assert to_batch(images).to(torch.device("meta")).images[4].device.type == "meta"


def test_a_pair_of_sequences_is_no_list_of_images():
    x, y = torch.rand(8, 5, 2), torch.rand(8, 5, 1)
    assert to_batch([x, y]).first is x


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        (lambda: torch.eye(4).to_sparse(), "but got a sparse one. Convert it with `to_dense"),
        (lambda: torch.eye(4).to_sparse_csr(), "but got a sparse one. Convert it with `to_dense"),
        (lambda: torch.nested.nested_tensor([torch.rand(2), torch.rand(3)]), "but got a nested one. Pad it"),
    ],
    ids=["coo", "csr", "nested"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_tensors_that_are_not_dense_are_told(tensor, sentence):
    for value in (tensor(), {"x": tensor()}):
        with pytest.raises(InputError, match=sentence):
            to_batch(value)


def test_a_tensor_without_values_is_told():
    with pytest.raises(InputError, match="on the meta device, which has none"):
        to_batch(torch.rand(2, 3, device="meta")).to(torch.device("cpu"))


@pytest.mark.parametrize("size", [2.5, "8", True, None, 0])
def test_a_batch_size_is_a_whole_number(size):
    with pytest.raises(InputError, match="Expected `batch_size` to be a whole number of at least 1"):
        list(to_batches(torch.rand(4, 2), batch_size=size))


def test_one_input_without_a_batch_dimension_is_told():
    with pytest.raises(InputError, match=r"For one input, add a batch dimension: `x\[None\]`"):
        check_input(to_batch(torch.rand(8)), "x")
    with pytest.raises(InputError, match="Are these labels"):
        check_input(to_batch(torch.ones(8, dtype=torch.int64)), "x")


def test_images_of_one_size_in_a_list_are_images():
    pair = [torch.rand(3, 32, 32), torch.rand(3, 32, 32)]
    assert to_batch(pair).images == pair
    assert to_batch([pair[0]] * 3).images is not None
    assert to_batch(tuple(pair)).images is None  # x and y
    assert to_batch([torch.rand(3, 8, 8), torch.rand(3, 8, 8)]).images is None
