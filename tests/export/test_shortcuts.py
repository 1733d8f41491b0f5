from __future__ import annotations

import numpy as np
import pytest

from neuralmean.export.shortcuts import convolve_shortcuts

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
helper = onnx.helper

FAR = 2**63 - 1


def make_graph(
    *,
    slices=((0, FAR, 2, 2), (0, FAR, 3, 2)),
    pads=(0, 1, 0, 0, 0, 2, 0, 0),
    value=None,
    mode="constant",
    outputs=("y",),
):
    """Every other position of `x` with channels of zeros around, as in a residual network without weights in shortcuts."""
    floats = onnx.TensorProto.FLOAT
    constants = {"pads": np.array(pads)}
    nodes = []
    for index, numbers in enumerate(slices):
        names = [f"{name}{index}" for name in ("start", "end", "axis", "step")]
        constants |= {name: np.array([number]) for name, number in zip(names, numbers, strict=True)}
        nodes.append(helper.make_node("Slice", [f"s{index}", *names], [f"s{index + 1}"]))
    values = [] if value is None else ["value"]
    if value is not None:
        constants["value"] = np.array(value, np.float32)
    nodes.append(helper.make_node("Pad", [f"s{len(slices)}", "pads", *values], ["padded"], mode=mode))
    nodes.append(helper.make_node("Relu", ["padded"], ["y"]))
    graph = helper.make_graph(
        [helper.make_node("Abs", ["x"], ["s0"]), *nodes],
        "shortcut",
        [helper.make_tensor_value_info("x", floats, ("n", 3, 5, 6))],
        [
            helper.make_tensor_value_info(name, floats, ("n", 3 if name == "s2" else None, None, None))
            for name in outputs
        ],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return onnx.shape_inference.infer_shapes(model)


def run(model):
    onnx.checker.check_model(model, full_check=True)
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 6)).astype(np.float32)
    return onnxruntime.InferenceSession(model.SerializeToString()).run(["y"], {"x": x})[0]


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (2, 6, 3, 3)),
        ({"value": 0.0}, (2, 6, 3, 3)),
        ({"slices": ()}, (2, 6, 5, 6)),
        ({"slices": ((0, FAR, 3, 2),)}, (2, 6, 5, 3)),
        ({"slices": ((0, 5, 2, 3), (0, FAR, 3, 1))}, (2, 6, 2, 6)),
        ({"slices": ((0, FAR, 2, 2), (0, FAR, 2, 2)), "pads": (0, 0, 0, 0, 0, 3, 0, 0)}, (2, 6, 2, 6)),
    ],
)
def test_a_shortcut_is_one_convolution_and_gives_the_same(options, shape):
    model = make_graph(**options)
    before = run(model)
    convolve_shortcuts(model)
    assert [node.op_type for node in model.graph.node] == ["Abs", "Conv", "Relu"]
    assert {tensor.name for tensor in model.graph.initializer} <= set(model.graph.node[1].input)
    after = run(model)
    assert after.shape == shape
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize(
    "options",
    [
        {"value": 1.0},
        {"mode": "edge", "pads": (0, 0, 1, 0, 0, 0, 1, 0)},
        {"pads": (0, 1, 1, 0, 0, 2, 0, 0)},
        {"pads": (0, -1, 0, 0, 0, 2, 0, 0)},
    ],
    ids=["not zeros", "edge", "also around the image", "channels are taken away"],
)
def test_other_padding_stays(options):
    model = make_graph(**options)
    before = model.SerializeToString()
    convolve_shortcuts(model)
    assert model.SerializeToString() == before


@pytest.mark.parametrize(
    "options",
    [
        {"slices": ((1, FAR, 2, 2),)},
        {"slices": ((0, 4, 2, 2),)},
        {"slices": ((0, FAR, 1, 2),)},
        {"outputs": ("y", "s2")},
    ],
    ids=["from the second on", "not to the end", "of the channels", "somebody else looks"],
)
def test_other_slices_stay_and_only_the_padding_is_replaced(options):
    model = make_graph(**options)
    before = run(model)
    slices = len([node for node in model.graph.node if node.op_type == "Slice"])
    convolve_shortcuts(model)
    assert [node.op_type for node in model.graph.node] == ["Abs", *["Slice"] * slices, "Conv", "Relu"]
    np.testing.assert_array_equal(run(model), before)
