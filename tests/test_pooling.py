from __future__ import annotations

import numpy as np
import pytest

from neuralmean.pooling import pool_means

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
helper = onnx.helper


def make_graph(axes=(2, 3), *, keepdims=0, shape=("n", 3, 4, 4), outputs=("y",)):
    """Two means of `a` and `b` side by side."""
    floats = onnx.TensorProto.FLOAT
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
    [{"keepdims": 1}, {"axes": (2,)}, {"axes": (1, 2)}, {"outputs": ("y", "mean_b")}],
    ids=["dimensions are kept", "not all positions", "not the positions", "somebody else looks at one"],
)
def test_other_means_stay(options):
    model = make_graph(**options)
    before = model.SerializeToString()
    pool_means(model)
    assert model.SerializeToString() == before
