from __future__ import annotations

import numpy as np
import pytest

from neuralmean.export.clamps import clamp_norms
from neuralmean.export.pooling import pool_means

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
helper = onnx.helper

GENERATOR = np.random.default_rng(1)
MIXED = (1.5, -0.7, 0.3, -2.0)


def make_graph(
    *,
    gamma=MIXED,
    beta=(0.5, 1.0, -0.4, -0.1),
    mean=(0.2, -0.3, 0.1, 0.4),
    variance=(0.5, 1.0, 2.0, 3.0),
    epsilon=1e-3,
    weight=None,
    bias=None,
    kernel=(1, 1),
    outputs=("y",),
    before=(),
    behind=(),
    x="x",
    **options,
):
    """A norm, a ReLU and a convolution of `x`, as in a dense network.

    Args:
        before: Nodes in front of the norm.
        behind: Nodes behind the convolution.
        x: What is normalised.
        options: Attributes of the convolution.
    """
    channels, group = len(gamma), options.get("group", 1)
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(6, channels // group, *kernel)) if weight is None else np.array(weight)
    constants = {"gamma": gamma, "beta": beta, "mean": mean, "variance": variance, "w": weight}
    constants |= {} if bias is None else {"bias": bias}
    constants["w16"] = generator.normal(size=(16, channels, 1, 1))
    convolved = ["relu", "w"] if bias is None else ["relu", "w", "bias"]
    given = "given" if any("given" in node.output for node in before) else "beta"
    nodes = [
        *before,
        helper.make_node(
            "BatchNormalization",
            [x, "gamma", given, "mean", "variance"],
            ["normed"],
            epsilon=epsilon,
        ),
        helper.make_node("Relu", ["normed"], ["relu"]),
        helper.make_node("Conv", convolved, ["y"], kernel_shape=list(kernel), **options),
        *behind,
    ]
    floats = onnx.TensorProto.FLOAT
    positions = (5,) * len(kernel)
    graph = helper.make_graph(
        nodes,
        "norm",
        [helper.make_tensor_value_info("x", floats, ("n", channels, *positions))],
        [helper.make_tensor_value_info(name, floats, None) for name in outputs],
        [
            *(onnx.numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in constants.items()),
            onnx.numpy_helper.from_array(np.arange(2, 2 + len(kernel)), "axes"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return onnx.shape_inference.infer_shapes(model)


def run(model, x=None):
    onnx.checker.check_model(model, full_check=True)
    shape = [dim.dim_value or 3 for dim in model.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(2).normal(size=shape) * 2 if x is None else x
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": np.asarray(x, np.float32)})


def kinds(model):
    return [node.op_type for node in model.graph.node]


def constants_of(model):
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.mark.parametrize("bias", [None, GENERATOR.normal(size=6)], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    "options",
    [{}, {"kernel": (3, 3)}, {"kernel": (3, 3), "strides": [2, 2], "auto_pad": "VALID"}, {"kernel": (3,)}],
    ids=["one position", "three by three", "strides", "a sequence"],
)
@pytest.mark.parametrize(
    ("gamma", "comparisons"),
    [
        (np.abs(MIXED), ["Max"]),
        (-np.abs(MIXED), ["Min"]),
        (MIXED, ["Max", "Min"]),
        ((1.5, 0.0, 0.0, -2.0), ["Max", "Min"]),
        ((1.5, 0.0, 0.0, 2.0), ["Max"]),
        ((-1.5, 0.0, 0.0, -2.0), ["Min"]),
        ((0.0, 0.0, 0.0, 0.0), ["Max"]),
        ((1e-3, 1e-6, -1e-6, -1e-3), ["Max", "Min"]),
        ((1e-20, -1e-20, 1e-30, -1e-40), ["Max"]),
    ],
    ids=["up", "down", "both", "zero", "zero and up", "zero and down", "all zero", "small", "tiny"],
)
def test_norm_and_relu_are_comparisons_and_give_the_same(gamma, comparisons, options, bias):
    model = make_graph(gamma=gamma, bias=bias, **options)
    before = run(model)[0]
    clamp_norms(model)
    assert kinds(model) == [*comparisons, "Conv"]
    np.testing.assert_allclose(run(model)[0], before, rtol=1e-5, atol=1e-5)


def test_the_constants_of_a_small_norm():
    model = make_graph(
        gamma=(2, -6), beta=(4, 3), mean=(1, 0), variance=(1, 4), epsilon=0.0, weight=[[[[5]], [[7]]]], bias=[1]
    )
    clamp_norms(model)
    highest, lowest, conv = model.graph.node
    values = constants_of(model)
    # The norm is 2 x + 2 and -3 x + 3: the ReLU starts at -1, and ends at 1.
    assert values[highest.input[1]].tolist() == [[[[-1]], [[-np.inf]]]]
    assert values[lowest.input[1]].tolist() == [[[[np.inf]], [[1]]]]
    assert values[conv.input[1]].tolist() == [[[[5 * 2]], [[7 * -3]]]]
    assert values[conv.input[2]].tolist() == [1 + 5 * 2 + 7 * 3]
    x = np.zeros((1, 2, 5, 5))
    x[0, :, 0, 0] = -2, 0.5  # the norm gives -2 and 1.5
    x[0, :, 0, 1] = 1, 4  # 4 and -9
    y = run(model, x)[0][0, 0, 0]
    assert y[:3].tolist() == [1 + 7 * 1.5, 1 + 5 * 4, 1 + 5 * 2 + 7 * 3]


def test_a_small_weight_counts_where_activations_are_large():
    model = make_graph(gamma=(1e-10,) * 4, beta=(1, -1, 1, -1), variance=(1,) * 4, mean=(0,) * 4)
    x = np.random.default_rng(0).normal(size=(2, 4, 5, 5)) * 1e10
    before = run(model, x)[0]
    clamp_norms(model)
    assert kinds(model) == ["Max", "Conv"]
    np.testing.assert_allclose(run(model, x)[0], before, rtol=1e-5, atol=1e-5)


def test_a_channel_with_a_weight_of_zero_is_the_part_of_its_bias_above_zero():
    model = make_graph(gamma=(0, 0), beta=(2, -3), mean=(1, 1), variance=(1, 1), weight=[[[[5]], [[7]]]])
    clamp_norms(model)
    values = constants_of(model)
    _, conv = model.graph.node
    assert not values[conv.input[1]].any()
    assert values[conv.input[2]].tolist() == [5 * 2]
    assert all(np.isfinite(value).all() for value in values.values())


def test_a_weight_that_another_convolution_uses_stays_for_that_one():
    model = make_graph(behind=[helper.make_node("Conv", ["x", "w"], ["other"])], outputs=("y", "other"))
    before = run(model)
    clamp_norms(model)
    assert kinds(model) == ["Max", "Min", "Conv", "Conv"]
    for old, new in zip(before, run(model), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5)


def test_no_constant_is_left_that_nobody_uses():
    model = make_graph()
    clamp_norms(model)
    assert set(constants_of(model)) == {name for node in model.graph.node for name in node.input} - {
        "x",
        *(name for node in model.graph.node for name in node.output),
    }


def test_a_norm_whose_mean_is_pooled_in_front_of_it_is_replaced():
    means = [helper.make_node("ReduceMean", [name, "axes"], [f"m_{name}"], keepdims=0) for name in ("normed", "two")]
    model = make_graph(
        gamma=MIXED * 2,
        **{name: GENERATOR.uniform(0.5, 2, 8) for name in ("beta", "mean", "variance")},
        x="two",
        before=[
            helper.make_node("Split", ["x"], ["left", "right"], axis=1, num_outputs=2),
            helper.make_node("Concat", ["right", "left"], ["two"], axis=1),
        ],
        behind=[*means, helper.make_node("Concat", ["m_normed", "m_two"], ["means"], axis=1)],
        outputs=("y", "means"),
    )
    before = run(model)
    clamp_norms(model)
    assert "BatchNormalization" in kinds(model)
    pool_means(model)
    clamp_norms(model)
    assert "BatchNormalization" not in kinds(model)
    for old, new in zip(before, run(model), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5)


def in_blocks(parts):
    """Options of a norm of `parts` convolutions of 16 channels side by side, which onnxruntime holds in blocks."""
    names = [f"c{part}" for part in range(parts)]
    return {
        **dict.fromkeys(("gamma", "beta", "mean", "variance"), (1,) * 16 * parts),
        "before": [
            *(helper.make_node("Conv", ["x", "w16"], [name]) for name in names),
            helper.make_node("Concat", names, ["joined"], axis=1),
        ],
        "x": "joined" if parts > 1 else "c0",
        "outputs": ("y", "joined"),
    }


@pytest.mark.parametrize(
    "options",
    [
        {"kernel": (3, 3), "pads": [1, 1, 1, 1]},
        {"kernel": (3, 3), "pads": [0, 0, 0, 1]},
        {"kernel": (3, 3), "auto_pad": "SAME_UPPER"},
        {"group": 2},
        {"outputs": ("y", "normed")},
        {"outputs": ("y", "relu")},
        {"behind": [helper.make_node("Abs", ["normed"], ["z"])], "outputs": ("y", "z")},
        {"behind": [helper.make_node("Abs", ["relu"], ["z"])], "outputs": ("y", "z")},
        {"before": [helper.make_node("Abs", ["beta"], ["given"])]},
        in_blocks(1),
        in_blocks(2),
    ],
    ids=[
        "padded",
        "padded at one side",
        "padded by name",
        "groups",
        "the norm is returned",
        "the ReLU is returned",
        "somebody else looks at the norm",
        "somebody else looks at the ReLU",
        "no constant",
        "in blocks",
        "side by side in blocks",
    ],
)
def test_other_norms_stay(options):
    model = make_graph(**options)
    clamp_norms(model)
    assert {"BatchNormalization", "Relu"} <= set(kinds(model))
    assert not {"Max", "Min"} & set(kinds(model))
    conv = next(node for node in model.graph.node if node.output[0] == "y")
    assert list(conv.input) == ["relu", "w"]


def test_a_weight_that_is_no_constant_stays():
    model = make_graph(before=[helper.make_node("Abs", ["w"], ["made"])])
    model.graph.node[-1].input[1] = "made"
    clamp_norms(model)
    assert kinds(model) == ["Abs", "BatchNormalization", "Relu", "Conv"]


def test_a_norm_in_training_stays():
    model = make_graph()
    model.graph.node[0].attribute.append(helper.make_attribute("training_mode", 1))
    clamp_norms(model)
    assert kinds(model) == ["BatchNormalization", "Relu", "Conv"]
