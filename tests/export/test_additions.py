from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from neuralmean.export.additions import convolve_additions

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
helper = onnx.helper


def make_graph(*, width=16, blocks=2, pooled=True, pool=None, shortcut=None, normed=False, flat=False, outputs=()):
    """A small residual network, the means of whose convolutions are returned.

    Args:
        pooled: Whether there are means.
        pool: What is between the first convolution and the blocks.
        shortcut: What is in the shortcuts.
        normed: Whether there is a norm in front of each addition, and the mean is read behind it.
        flat: Whether what the shortcut adds is the same at all positions.
        outputs: What is returned besides.
    """
    generator = np.random.default_rng(0)
    constants = {"w": generator.normal(size=(width, 3, 3, 3))}
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4), helper.make_node("Relu", ["c"], ["r"])]
    if pool:
        nodes.append(helper.make_node(pool, ["r"], ["p"], **({} if pool == "Softplus" else {"kernel_shape": [2, 2]})))
    last, means = "p" if pool else "r", []
    for block in range(blocks):
        constants[f"w{block}"] = generator.normal(size=(width, width, 3, 3)) / width
        nodes.append(helper.make_node("Conv", [last, f"w{block}"], [f"c{block}"], pads=[1] * 4))
        made = f"c{block}"
        if normed:
            names = [f"{name}{block}" for name in ("gamma", "beta", "mean", "variance")]
            constants |= {name: generator.uniform(0.5, 2, width) for name in names}
            nodes.append(helper.make_node("BatchNormalization", [made, *names], [f"n{block}"]))
            made = f"n{block}"
        if pooled:
            nodes.append(helper.make_node("GlobalAveragePool", [made], [f"m{block}"]))
            means.append(f"m{block}")
        if shortcut:
            nodes.append(helper.make_node(shortcut, [last], [f"s{block}"]))
            last = f"s{block}"
        if flat:
            nodes.append(helper.make_node("GlobalAveragePool", [last], [f"f{block}"]))
            last = f"f{block}"
        nodes.append(helper.make_node("Add", [last, made] if block % 2 else [made, last], [f"a{block}"]))
        nodes.append(helper.make_node("Relu", [f"a{block}"], [f"r{block}"]))
        last = f"r{block}"
    floats = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "residual",
        [helper.make_tensor_value_info("x", floats, ("n", 3, 8, 8))],
        [helper.make_tensor_value_info(name, floats, None) for name in (last, *means, *outputs)],
        [onnx.numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return onnx.shape_inference.infer_shapes(model)


def run(model, optimised=None):
    """Return what a graph gives; write what onnxruntime makes of it to a file."""
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # a written graph is for this machine only, of which it warns
    if optimised is not None:
        options.optimized_model_filepath = str(optimised)
    x = np.random.default_rng(1).normal(size=(2, 3, 8, 8)).astype(np.float32)
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})


def added(model):
    """The convolutions of ones."""
    return [node for node in model.graph.node if any(attribute.name == "group" for attribute in node.attribute)]


@pytest.mark.parametrize(
    ("options", "convolved"),
    [
        ({}, ["r", "r0"]),
        ({"pool": "MaxPool"}, ["p", "r0"]),
        ({"pool": "AveragePool"}, ["p", "r0"]),
        ({"width": 24}, ["r", "r0"]),
        ({"normed": True}, ["r", "n1"]),
    ],
    ids=["plain", "largest", "mean", "width 24", "norms"],
)
def test_additions_go_with_a_convolution_and_give_the_same(options, convolved):
    model = make_graph(**options)
    before = run(model)
    convolve_additions(model)
    assert [node.input[0] for node in added(model)] == convolved
    for old, new in zip(before, run(model), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5)


def test_onnxruntime_runs_addition_and_relu_as_one(tmp_path):
    model = make_graph(blocks=4)
    counts = []
    for name in ("before", "after"):
        run(model, tmp_path / name)
        counts.append(Counter(node.op_type for node in onnx.load(tmp_path / name).graph.node))
        convolve_additions(model)
    before, after = counts
    if before["ReorderOutput"] == 0:
        pytest.skip("onnxruntime has no blocks of channels on this machine")
    assert (before["Add"], before["Relu"]) == (4, 4)
    assert (after["Add"], after["Relu"]) == (0, 0)
    assert after.total() == before.total() - 4


def test_ones_of_a_width_are_there_once():
    model = make_graph(blocks=3)
    constants = len(model.graph.initializer)
    convolve_additions(model)
    assert len(added(model)) == 3
    assert len(model.graph.initializer) == constants + 1
    ones = next(tensor for tensor in model.graph.initializer if tensor.name == added(model)[0].input[1])
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(ones), np.ones((16, 1, 1, 1)))


def test_a_second_time_changes_nothing():
    model = make_graph()
    convolve_additions(model)
    before = model.SerializeToString()
    convolve_additions(model)
    assert model.SerializeToString() == before


def test_of_two_convolutions_that_others_look_at_one_is_followed_by_ones():
    model = make_graph(blocks=1, outputs=("c",))
    model.graph.node[-2].input[1] = "c"
    before = run(model)
    convolve_additions(model)
    assert [node.input[0] for node in added(model)] == ["c"]
    for old, new in zip(before, run(model), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5)


def test_hundreds_of_blocks_are_fine():
    model = make_graph(blocks=700, width=8)
    convolve_additions(model)
    assert len(added(model)) == 700


@pytest.mark.parametrize(
    "options",
    [
        {"pooled": False},
        {"pooled": False, "normed": True},
        {"outputs": ("a0",), "blocks": 1},
        {"pool": "Softplus", "blocks": 1},
        {"shortcut": "Softplus"},
        {"flat": True, "blocks": 1},
        {"width": 6},
    ],
    ids=[
        "a convolution takes it in",
        "a convolution takes norm and addition in",
        "somebody else looks",
        "the first is not in blocks",
        "shortcuts are not in blocks",
        "another shape",
        "not in blocks",
    ],
)
def test_other_additions_stay(options):
    model = make_graph(**options)
    before = model.SerializeToString()
    convolve_additions(model)
    assert model.SerializeToString() == before


def test_an_addition_without_a_relu_stays():
    model = make_graph(blocks=1)
    model.graph.node[-1].op_type = "Abs"
    before = model.SerializeToString()
    convolve_additions(model)
    assert model.SerializeToString() == before
