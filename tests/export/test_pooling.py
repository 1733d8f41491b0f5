from __future__ import annotations

import itertools

import numpy as np
import pytest

from neuralmean.export.pooling import pool_means

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
    [{"keepdims": 1, "shape": ("n", 3, 4), "axes": (2,)}, {"axes": (2,)}, {"axes": (1, 2)}, {"dtype": "DOUBLE"}],
    ids=["kept, of a sequence", "not all positions", "not the positions", "double"],
)
def test_other_means_stay(options):
    model = make_graph(**options)
    before = model.SerializeToString()
    pool_means(model)
    assert model.SerializeToString() == before


def test_a_mean_that_somebody_else_looks_at_is_pooled_by_itself():
    a, b = (np.random.default_rng(seed).normal(size=(2, 3, 4, 4)).astype(np.float32) for seed in (0, 1))
    model = make_graph(outputs=("y", "mean_b"))
    before = run(model, a=a, b=b)
    pool_means(model)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds == ["Relu", "GlobalAveragePool", "Flatten", "GlobalAveragePool", "Flatten", "Concat", "Abs"]
    np.testing.assert_allclose(run(model, a=a, b=b), before, rtol=1e-5, atol=1e-6)


def test_means_that_keep_their_dimensions_are_pooled():
    a, b = (np.random.default_rng(seed).normal(size=(2, 3, 4, 4)).astype(np.float32) for seed in (0, 1))
    model = make_graph(keepdims=1)
    before = run(model, a=a, b=b)
    pool_means(model)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds == ["Relu", "GlobalAveragePool", "GlobalAveragePool", "Concat", "Abs"]
    np.testing.assert_allclose(run(model, a=a, b=b), before, rtol=1e-5, atol=1e-6)


def make_dense_graph(*, flat, tail=()):
    """A growing tensor, as in a dense network: means of all of it, of it behind a batch norm, and of parts.

    Args:
        flat: Whether the larger tensor is made of all parts, and not of the smaller one and a part.
        tail: Pairs of operation and constant that follow the vector.
    """
    floats = onnx.TensorProto.FLOAT
    parts = ["c", "b", "b"] if flat else ["two", "b"]
    nodes = [
        helper.make_node("Conv", ["a", "w"], ["c"], kernel_shape=[1, 1]),
        helper.make_node("Concat", ["c", "b"], ["two"], axis=1),
        helper.make_node("ReduceMean", ["two", "axes"], ["mean_two"], keepdims=0),
        helper.make_node("Concat", parts, ["three"], axis=1),
        helper.make_node("BatchNormalization", ["three", *"gsmv"], ["normed"], epsilon=1e-3),
        helper.make_node("ReduceMean", ["normed", "axes"], ["mean_three"], keepdims=0),
        helper.make_node("BatchNormalization", ["c", "g3", "s3", "m3", "v3"], ["alone"]),
        helper.make_node("ReduceMean", ["alone", "axes"], ["mean_alone"], keepdims=0),
        helper.make_node("ReduceMean", ["c", "axes"], ["mean_c"], keepdims=0),
        helper.make_node("Concat", ["mean_two", "mean_three", "mean_alone", "mean_c"], ["t0"], axis=1),
    ]
    generator = np.random.default_rng(1)
    weights = {f"{name}{size}": generator.uniform(0.5, 2, int(size or 12)) for name in "gsmv" for size in ("", "3")}
    weights = {name: np.resize(value, 4) if name.endswith("3") else value for name, value in weights.items()}
    weights["w"] = generator.normal(size=(4, 4, 1, 1))
    for step, (kind, constant) in enumerate(tail):
        weights[f"k{step}"] = constant
        nodes.append(helper.make_node(kind, [f"t{step}", f"k{step}"], [f"t{step + 1}"]))
    nodes.append(helper.make_node("Identity", [f"t{len(tail)}"], ["y"]))
    channels = {"c": 4, "two": 8, "three": 12, "normed": 12, "alone": 4}
    graph = helper.make_graph(
        nodes,
        "dense",
        [helper.make_tensor_value_info(name, floats, ("n", 4, 3, 3)) for name in ("a", "b")],
        [helper.make_tensor_value_info("y", floats, ("n", 28))],
        [
            onnx.numpy_helper.from_array(np.array([2, 3]), "axes"),
            *(onnx.numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in weights.items()),
        ],
        value_info=[helper.make_tensor_value_info(name, floats, ("n", size, 3, 3)) for name, size in channels.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("size", [0, 1, 3])
def test_only_the_largest_of_growing_tensors_is_pooled(flat, size):
    generator = np.random.default_rng(0)
    a, b = (generator.normal(size=(size, 4, 3, 3)).astype(np.float32) for _ in "ab")
    model = make_dense_graph(flat=flat)
    before = run(model, a=a, b=b)
    pool_means(model)
    pooled = [node.input[0] for node in model.graph.node if node.op_type == "GlobalAveragePool"]
    assert pooled == ["three", "alone"]  # a batch norm that a convolution may take in is not passed
    after = run(model, a=a, b=b)
    assert after.shape == (size, 28)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)


def test_channels_are_moved_in_pieces_and_not_one_by_one():
    model = make_dense_graph(flat=True)
    pool_means(model)
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    gather = next(node for node in model.graph.node if node.op_type == "Gather")
    # Pieces of 4 of c, b, b, alone: two is c b; three is c b b, whose second b may as well be the first; then alone, c.
    assert constants[gather.input[1]].tolist() == [0, 1, 0, 1, 1, 3, 0]


def test_constants_behind_the_vector_are_taken_in():
    generator = np.random.default_rng(0)
    a, b = (generator.normal(size=(2, 4, 3, 3)).astype(np.float32) for _ in "ab")
    tail = [("Mul", generator.uniform(1, 2, 28)), ("Add", generator.normal(size=28)), ("Sub", np.array(0.5))]
    model = make_dense_graph(flat=False, tail=tail)
    before = run(model, a=a, b=b)
    pool_means(model)
    assert [node.op_type for node in model.graph.node][-4:] == ["Flatten", "Mul", "Add", "Identity"]
    np.testing.assert_allclose(run(model, a=a, b=b), before, rtol=1e-5, atol=1e-5)


def test_no_constant_is_left_that_nobody_uses():
    model = make_dense_graph(flat=False, tail=[("Mul", np.ones(28))])
    pool_means(model)
    used = {name for node in model.graph.node for name in node.input}
    assert {tensor.name for tensor in model.graph.initializer} <= used


def test_a_constant_that_only_a_branch_uses_stays():
    model = make_graph()
    floats = onnx.TensorProto.FLOAT
    scalar = helper.make_tensor_value_info("inner", floats, [])
    branch = helper.make_graph([helper.make_node("Identity", ["kept"], ["inner"])], "branch", [], [scalar])
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(3).reshape(()), "kept"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "yes"))
    model.graph.node.append(helper.make_node("If", ["yes"], ["choice"], then_branch=branch, else_branch=branch))
    model.graph.output.append(helper.make_tensor_value_info("choice", floats, []))
    pool_means(model)
    onnx.checker.check_model(model, full_check=True)
    assert {"kept", "yes"} <= {tensor.name for tensor in model.graph.initializer}


def test_means_that_a_runtime_holds_in_blocks_are_joined_first():
    floats, widths = onnx.TensorProto.FLOAT, (3, 24, 48, 48, 20)
    names = ["a0", "a1", "a2", "a3", "a4"]
    generator = np.random.default_rng(0)
    constants = {"axes": np.array([2, 3])}
    nodes = []
    for index, (before, behind) in enumerate(itertools.pairwise(widths)):
        constants[f"w{index}"] = generator.normal(size=(behind, before, 1, 1)).astype(np.float32)
        nodes.append(helper.make_node("Conv", [names[index], f"w{index}"], [names[index + 1]]))
        nodes.append(helper.make_node("ReduceMean", [names[index + 1], "axes"], [f"mean{index}"], keepdims=0))
    nodes.append(helper.make_node("Concat", [f"mean{index}" for index in range(4)], ["joined"], axis=1))
    nodes.append(helper.make_node("Abs", ["joined"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "blocks",
        [helper.make_tensor_value_info("a0", floats, ("n", 3, 4, 4))],
        [helper.make_tensor_value_info("y", floats, ("n", sum(widths[1:])))],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    model = onnx.shape_inference.infer_shapes(model)
    a = generator.normal(size=(2, 3, 4, 4)).astype(np.float32)
    before = run(model, a0=a)
    pool_means(model)
    joins = [list(node.input) for node in model.graph.node if node.op_type == "Concat"]
    assert joins[:2] == [["mean1", "mean2"], ["mean0", "mean3"]]  # of 24 and 20 channels there are no whole blocks
    np.testing.assert_allclose(run(model, a0=a), before, rtol=1e-5, atol=1e-6)
