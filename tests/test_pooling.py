from __future__ import annotations

import numpy as np
import pytest

from neuralmean.pooling import pool_means, split_pools

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
helper = onnx.helper


def make_graph(axes=(2, 3), *, keepdims=0, shape=("n", 3, 4, 4), outputs=("y",), dtype="FLOAT"):
    """Two means of `a` and `b` side by side."""
    floats = getattr(onnx.TensorProto, dtype)
    rank = len(shape) - len(axes) if not keepdims else len(shape)
    nodes = [
        helper.make_node("Relu", ["a"], ["c"]),
        helper.make_node("ReduceMean", ["c", "axes"], ["mean_a"], keepdims=keepdims),
        helper.make_node("ReduceMean", ["b", "axes"], ["mean_b"], keepdims=keepdims),
        helper.make_node("Concat", ["mean_a", "mean_b"], ["joined"], axis=1),
        helper.make_node("Abs", ["joined"], ["y"]),
    ]
    kinds = {"y": rank, "mean_b": rank}
    graph = helper.make_graph(
        nodes,
        "means",
        [helper.make_tensor_value_info(name, floats, shape) for name in ("a", "b")],
        [helper.make_tensor_value_info(name, floats, [None] * kinds[name]) for name in outputs],
        [onnx.numpy_helper.from_array(np.array(axes, dtype=np.int64), "axes")],
        value_info=[
            helper.make_tensor_value_info("c", floats, shape),
            *(helper.make_tensor_value_info(name, floats, [None] * rank) for name in ("mean_a", "joined")),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def run(model, **feeds):
    onnx.checker.check_model(model, full_check=True)
    return onnxruntime.InferenceSession(model.SerializeToString()).run(["y"], feeds)[0]


@pytest.mark.parametrize(
    ("axes", "shape"),
    [((2, 3), ("n", 3, 4, 4)), ((-1, -2), ("n", 3, 4, 4)), ((2,), ("n", 3, 5)), ((2, 3, 4), ("n", 2, 3, 3, 3))],
)
def test_means_over_positions_are_pooled_and_stay_what_they_are(axes, shape):
    generator = np.random.default_rng(0)
    a, b = (generator.normal(size=(2, *shape[1:])).astype(np.float32) for _ in "ab")
    model = make_graph(axes, shape=shape)
    before = run(model, a=a, b=b)
    pool_means(model)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds == ["Relu", "GlobalAveragePool", "GlobalAveragePool", "Concat", "Flatten", "Abs"]
    after = run(model, a=a, b=b)
    assert after.shape == before.shape == (2, 2 * shape[1])
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"keepdims": 1}, {"axes": (2,)}, {"axes": (1, 2)}, {"outputs": ("y", "mean_b")}, {"dtype": "DOUBLE"}],
    ids=["dimensions are kept", "not all positions", "not the positions", "somebody else looks at one", "double"],
)
def test_other_means_stay(options):
    model = make_graph(**options)
    before = model.SerializeToString()
    pool_means(model)
    assert model.SerializeToString() == before


def make_dense_graph():
    """A growing tensor, as in a dense network: means of all of it, and of it behind a batch norm."""
    floats = onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("Relu", ["a"], ["c"]),
        helper.make_node("Concat", ["c", "b"], ["two"], axis=1),
        helper.make_node("GlobalAveragePool", ["two"], ["mean_two"]),
        helper.make_node("Concat", ["two", "b"], ["three"], axis=1),
        helper.make_node("BatchNormalization", ["three", *"gsmv"], ["normed"], epsilon=1e-3),
        helper.make_node("GlobalAveragePool", ["normed"], ["mean_three"]),
        helper.make_node("BatchNormalization", ["c", "g3", "s3", "m3", "v3"], ["alone"]),
        helper.make_node("GlobalAveragePool", ["alone"], ["mean_alone"]),
        helper.make_node("Concat", ["mean_two", "mean_three", "mean_alone"], ["y"], axis=1),
    ]
    generator = np.random.default_rng(1)
    weights = {f"{name}{size}": generator.uniform(0.5, 2, int(size or 9)) for name in "gsmv" for size in ("", "3")}
    graph = helper.make_graph(
        nodes,
        "dense",
        [helper.make_tensor_value_info(name, floats, ("n", 3, 4, 4)) for name in ("a", "b")],
        [helper.make_tensor_value_info("y", floats, ("n", 18, 1, 1))],
        [onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_each_part_of_a_growing_tensor_is_pooled_once():
    generator = np.random.default_rng(0)
    a, b = (generator.normal(size=(2, 3, 4, 4)).astype(np.float32) for _ in "ab")
    model = make_dense_graph()
    before = run(model, a=a, b=b)
    split_pools(model)
    pooled = [node.input[0] for node in model.graph.node if node.op_type == "GlobalAveragePool"]
    assert pooled == ["c", "b", "alone"]  # a batch norm that a convolution may take in is not passed
    np.testing.assert_allclose(run(model, a=a, b=b), before, rtol=1e-5, atol=1e-6)


def test_a_graph_without_pools_stays():
    model = make_graph()
    before = model.SerializeToString()
    split_pools(model)
    assert model.SerializeToString() == before
