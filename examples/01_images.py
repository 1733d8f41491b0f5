# %% [markdown]
# # Images: train, attach, decide, explain
#
# A small network learns the digits 0 to 7 of scikit-learn. What does it make of an 8, or of a patch of a photograph?
# Everything here is embedded; nothing is downloaded.
#
# Download this page as a notebook: {nb-download}`01_images.ipynb`

# %%
import torch

from neuralmean import Detector
from neuralmean.cli.demo import load_data, train_model

torch.manual_seed(0)
data = load_data()
model = train_model(data)

# %% [markdown]
# ## Attach and fit
#
# The network has batch norms, so the reference (the training data's mean of every channel) is already in its buffers. The images of `id_data` may be
# training images; those of `held_out` must be new to the model, because the threshold comes from them.

# %%
detector = Detector(model).fit(data.train, held_out=data.held_out)
detector

# %% [markdown]
# ## Decide
#
# One forward pass gives the model's own output, bit for bit, and the decision.

# %%
output, decision = detector(data.test[:5])
decision

# %%
for name, images in {"known digits": data.test, "digits 8 and 9": data.near, "photo patches": data.far}.items():
    flagged = detector.predict(images).is_ood.float().mean().item()
    print(f"{name}: {100 * flagged:.0f} % flagged")

# %% [markdown]
# ## Explain
#
# Which layers saw something unusual? Contributions add up to the score.

# %%
explanation = detector.explain(data.far[:3])
explanation

# %% [markdown]
# ## Several images at once
#
# Images from the same source are much easier to judge together: the noise of single images averages out.

# %%
print("8 known digits:", round(detector.score_batch(data.test[:8]), 2))
print("8 eights and nines:", round(detector.score_batch(data.near[:8]), 2))

# %% [markdown]
# ## Save and load
#
# The file holds the detector, not the model, and no pickle.

# %%
import tempfile
from pathlib import Path

path = Path(tempfile.mkdtemp()) / "digits.nmd"
detector.save(path)
again = Detector.load(path, model)
print(torch.equal(again.score(data.test), detector.score(data.test)), f"{path.stat().st_size / 1e3:.0f} kB")
