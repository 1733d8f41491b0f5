from __future__ import annotations

import numpy as np
import pytest

from neuralmean.export.transitions import stride_poolings

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
helper = onnx.helper


def make_graph(*, conv=None, pool=None, kernel=(1, 1), bias=True, outputs=("y",), channels=6, group=1, size=(7, 6)):
    """A convolution of `x` and its average pooling."""
    floats = onnx.TensorProto.FLOAT
    generator = np.random.default_rng(0)
    constants = {"weight": generator.normal(size=(channels, 4 // group, *kernel)).astype(np.float32)}
    if bias:
        constants["bias"] = generator.normal(size=channels).astype(np.float32)
    pool = {"kernel_shape": [2, 3], "strides": [2, 3]} | (pool or {})
    nodes = [
        helper.make_node("Conv", ["x", *constants], ["between"], group=group, **(conv or {})),
        helper.make_node("AveragePool", ["between"], ["pooled"], **pool),
        helper.make_node("Relu", ["pooled"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "transition",
        [helper.make_tensor_value_info("x", floats, ("n", 4, *size))],
        [helper.make_tensor_value_info(name, floats, ("n", channels, None, None)) for name in outputs],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return onnx.shape_inference.infer_shapes(model)


def run(model, size=(7, 6)):
    onnx.checker.check_model(model, full_check=True)
    x = np.random.default_rng(1).normal(size=(2, 4, *size)).astype(np.float32)
    return onnxruntime.InferenceSession(model.SerializeToString()).run(["y"], {"x": x})[0]


def kinds(model):
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"group": 2},
        {"conv": {"pads": [0] * 4, "strides": [1, 1], "kernel_shape": [1, 1]}},
        {"pool": {"pads": [0] * 4, "count_include_pad": 1}},
        {"pool": {"auto_pad": "VALID"}},
        {"pool": {"kernel_shape": [2, 2], "strides": [2, 2]}},
    ],
    ids=str,
)
def test_pooling_and_convolution_are_one_convolution_with_the_same_result(options):
    model = make_graph(**options)
    before = run(model)
    stride_poolings(model)
    assert kinds(model) == ["Conv", "Relu"]
    assert {tensor.name for tensor in model.graph.initializer} <= {"pooled_neuralmean_weight", "bias"}
    after = run(model)
    assert after.shape == before.shape  # of seven rows one is left over
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"kernel": (3, 3)},
        {"conv": {"strides": [2, 2]}},
        {"conv": {"pads": [1, 1, 1, 1]}},
        {"pool": {"strides": [1, 1]}},
        {"pool": {"pads": [1, 1, 1, 1]}},
        {"pool": {"ceil_mode": 1}},
        {"outputs": ("y", "between")},
        {"channels": 16},
    ],
    ids=[
        "three positions",
        "a stride",
        "padding",
        "tiles that overlap",
        "padding of the pooling",
        "tiles that are not whole",
        "somebody else looks",
        "in blocks",
    ],
)
def test_whatever_else_stays_as_it_is(options):
    model = make_graph(**options)
    before = model.SerializeToString()
    stride_poolings(model)
    assert model.SerializeToString() == before


def test_weights_that_come_from_outside_stay():
    model = make_graph(bias=False)
    weight = model.graph.initializer.pop()
    model.graph.input.append(helper.make_tensor_value_info("weight", weight.data_type, weight.dims))
    stride_poolings(model)
    assert kinds(model) == ["Conv", "AveragePool", "Relu"]


def test_weights_that_another_convolution_uses_stay_as_they_are_for_it():
    model = make_graph(bias=False)
    model.graph.node.insert(0, helper.make_node("Conv", ["x", "weight"], ["other"]))
    model.graph.output.append(helper.make_tensor_value_info("other", onnx.TensorProto.FLOAT, ("n", 6, 7, 6)))
    before = run(model)
    stride_poolings(model)
    assert kinds(model) == ["Conv", "Conv", "Relu"]
    np.testing.assert_allclose(run(model), before, rtol=1e-5, atol=1e-6)
