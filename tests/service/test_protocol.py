"""The Open Inference Protocol: what is read, what is written, and every refusal."""

import json

import numpy as np
import pytest

from neuralmean.service.protocol import InferRequest, InputSpec, encode_infer, model_metadata, parse_infer
from neuralmean.service.refusal import Refusal

SPEC = InputSpec((2, None), max_rows=4)


def _request(**changes):
    tensor = {"name": "input", "shape": [1, 2, 2], "datatype": "FP32", "data": [1, 2, 3, 4]}
    return {"inputs": [{**tensor, **changes}]}


def _parse(request, header_length=None, binary=b""):
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    return parse_infer(body + binary, header_length and str(len(body)), SPEC)


def test_flat_and_nested_data_are_the_same_tensor():
    flat = _parse(_request())
    nested = _parse(_request(data=[[[1, 2], [3, 4]]]))
    assert flat.inputs.dtype == np.float32
    assert flat.inputs.tolist() == nested.inputs.tolist() == [[[1, 2], [3, 4]]]
    assert flat.id is None
    assert flat.outputs == (("output", False), ("score", False), ("p_value", False), ("is_ood", False))


@pytest.mark.parametrize(("datatype", "dtype"), [("FP16", "<f2"), ("FP32", "<f4"), ("FP64", "<f8")])
def test_binary_tensors_are_little_endian_rows(datatype, dtype):
    data = np.array([1.5, 2, 3, -4], dtype).tobytes()
    request = _request(datatype=datatype, parameters={"binary_data_size": len(data)})
    del request["inputs"][0]["data"]
    assert _parse(request, True, data).inputs.tolist() == [[[1.5, 2], [3, -4]]]


def test_outputs_are_those_asked_for_each_in_its_form():
    request = _request() | {
        "id": "7",
        "parameters": {"binary_data_output": True},
        "outputs": [{"name": "is_ood"}, {"name": "score", "parameters": {"binary_data": False}}],
    }
    assert _parse(request).outputs == (("is_ood", True), ("score", False))
    assert _parse(request).id == "7"


def test_a_response_holds_json_or_binary_as_asked():
    arrays = {"score": np.array([0.5, 2], np.float32), "is_ood": np.array([False, True])}
    plain = InferRequest("a", np.zeros((2, 2, 2), np.float32), (("score", False), ("is_ood", False)))
    body, length = encode_infer(plain, arrays, "toy")
    assert length is None
    assert json.loads(body) == {
        "id": "a",
        "model_name": "toy",
        "model_version": "1",
        "outputs": [
            {"name": "score", "datatype": "FP32", "shape": [2], "data": [0.5, 2.0]},
            {"name": "is_ood", "datatype": "BOOL", "shape": [2], "data": [False, True]},
        ],
    }
    packed = InferRequest(None, plain.inputs, (("score", True), ("is_ood", True)))
    body, length = encode_infer(packed, arrays, "toy")
    assert json.loads(body[:length])["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert body[length:] == np.array([0.5, 2], "<f4").tobytes() + b"\x00\x01"


def test_what_json_has_no_word_for_is_null_and_an_output_that_is_no_tensor_is_left_out():
    request = InferRequest(None, np.zeros((1, 2, 2), np.float32), (("output", False), ("score", False)))
    body, _ = encode_infer(request, {"score": np.array([np.inf], np.float32)}, "toy")
    assert [output["data"] for output in json.loads(body)["outputs"]] == [[None]]


def test_metadata_names_inputs_and_outputs():
    metadata = model_metadata("toy", SPEC, (3,))
    assert metadata["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 2, -1]}]
    assert [output["name"] for output in metadata["outputs"]] == ["output", "score", "p_value", "is_ood"]
    assert metadata["outputs"][0]["shape"] == [-1, 3]
    assert model_metadata("toy", InputSpec(None, 4), None)["outputs"][0]["name"] == "score"


REFUSED = {
    "no_json": (b"{", "Expected the body to be JSON with finite numbers, but it cannot be read"),
    "not_utf8": (b"\xff\xfe{}", "Expected the body to be JSON with finite numbers, but it cannot be read"),
    "deep": (b"[" * 100_000, "Expected the body to be JSON with finite numbers, but it cannot be read"),
    "list": ([], "Expected the body to be a JSON object, but got a list"),
    "no_inputs": ({}, "Expected `inputs` to be a list with one tensor, but got none"),
    "two_inputs": ({"inputs": [{}, {}]}, "Expected `inputs` to be a list with one tensor, but got 2 of them"),
    "id": (_request() | {"id": 5}, "Expected `id` to be a text"),
    "name": (_request(name="x"), "Expected the input to be called 'input', but got 'x'"),
    "integers": (_request(datatype="UINT8"), "Expected `datatype` to be FP32, FP64 or FP16, .* but got 'UINT8'. Post"),
    "no_datatype": (_request(datatype=None), "Expected `datatype` to be FP32"),
    "shape_text": (_request(shape="1"), r"Expected `shape` to be \[-1, 2, -1\], but got a text that is no list"),
    "shape_zero": (_request(shape=[0, 2, 2]), r"Expected `shape` to be \[-1, 2, -1\], but got a list that is no list"),
    "shape_flag": (_request(shape=[True, 2, 2]), "positive whole numbers"),
    "shape_other": (_request(shape=[1, 3, 2]), r"with -1 for the number of inputs, but got \[1, 3, 2\]"),
    "shape_long": (_request(shape=[1, 2, 2, 1]), r"but got \[1, 2, 2, 1\]"),
    "ragged": (_request(data=[[1, 2], [3]]), "a flat or evenly nested list of numbers, but it is ragged"),
    "texts": (_request(data=["1", "2", "3", "4"]), "Expected `data` to hold nothing but numbers"),
    "flags": (_request(data=[True] * 4), "Expected `data` to hold nothing but numbers"),
    "nulls": (_request(data=[None] * 4), "Expected `data` to hold nothing but numbers"),
    "one long text": (_request(data=["x" * 1000, *[""] * 3]), "Expected `data` to hold nothing but numbers"),
    "ragged inside": (
        _request(data=[[[1], [2]], [[3], 4]]),
        "a flat or evenly nested list of numbers, but it is ragged",
    ),
    "huge": (_request(data=[10**400] * 4), "Expected `data` to hold nothing but numbers"),
    "too_few": (_request(data=[1]), "Expected `data` to hold 4 numbers for this shape, but got 1"),
    "no_data": (_request(data=None), "Expected `data` to be a list of numbers, but got nothing"),
    "nan": (_request(data=[float("nan")] * 4), "Expected finite numbers in `data`, but got NaN or Inf"),
    "overflow": (_request(datatype="FP64", data=[1e300] * 4), "or numbers too large for FP32"),
    "outputs": (_request() | {"outputs": {}}, "Expected `outputs` to be a list of objects, but got an object"),
    "output": (_request() | {"outputs": [{"name": "x"}]}, "Expected the outputs to be among .* but got 'x'"),
    "twice": (_request() | {"outputs": [{"name": "score"}] * 2}, "Expected every output to be requested once"),
    "size": (
        _request(parameters={"binary_data_size": 3}),
        "Expected 3 bytes of binary data, as the request says, but it brings 0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_with_a_sentence(case):
    request, sentence = REFUSED[case]
    with pytest.raises(Refusal, match=sentence) as caught:
        _parse(request)
    assert caught.value.status == 400


def test_too_many_inputs_are_too_large():
    with pytest.raises(Refusal, match="Expected at most 4 inputs in one request, but got 5") as caught:
        _parse(_request(shape=[5, 2, 2]))
    assert caught.value.status == 413


def test_bytes_without_their_size_are_refused():
    with pytest.raises(Refusal, match="Expected `binary_data_size` among the input's parameters"):
        _parse(_request(), True, b"1234")


@pytest.mark.parametrize("length", ["x", "-1", "1.5", "²", "9" * 13], ids=ascii)
def test_a_header_length_that_is_no_number_is_refused(length):
    with pytest.raises(Refusal, match="Expected Inference-Header-Content-Length to be a whole number"):
        parse_infer(b"{}", length, SPEC)


@pytest.mark.parametrize("length", ["0", "3"])
def test_a_header_length_out_of_range_is_refused(length):
    with pytest.raises(Refusal, match=f"to be from 1 to the 2 bytes sent, but got {length}"):
        parse_infer(b"{}", length, SPEC)
