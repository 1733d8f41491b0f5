# %% [markdown]
# # A table of numbers
#
# Rows of a laboratory's measurements, and a small network without batch norm. What if the unit of one column changes, or a sensor is stuck?
#
# Download this page as a notebook: {nb-download}`03_table.ipynb`

# %%
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

from neuralmean import Detector

torch.manual_seed(0)
table = load_breast_cancer()
rows = torch.tensor(table.data, dtype=torch.float32)[
    torch.randperm(len(table.data), generator=torch.Generator().manual_seed(0))
]
labels = torch.tensor(table.target)[torch.randperm(len(table.data), generator=torch.Generator().manual_seed(0))]
mean, std = rows[:300].mean(0), rows[:300].std(0)
rows = (rows - mean) / std
train, held_out, test = rows[:300], rows[300:450], rows[450:]

# %%
model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
for _ in range(60):
    loss = nn.functional.cross_entropy(model(train), labels[:300])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    print(f"accuracy on new rows: {100 * (model(test).argmax(1) == labels[450:]).float().mean():.0f} %")

# %% [markdown]
# Linear layers have one number per channel, so each channel's value is its own mean. A pandas DataFrame may be passed as it is, too.

# %%
detector = Detector(model).fit(train, held_out=held_out)
detector

# %%
stuck = test.clone()
stuck[:, 3] = 8.0  # a sensor that always reports the same, high value
millimetres = (test * std + mean) * torch.where(torch.arange(30) % 10 == 0, 10.0, 1.0)
millimetres = (millimetres - mean) / std
for name, values in {"new rows": test, "stuck sensor": stuck, "three columns in millimetres": millimetres}.items():
    flagged = 100 * detector.predict(values).is_ood.float().mean()
    print(
        f"{name}: {flagged:.0f} % of rows flagged; all rows judged together: score {detector.score_batch(values):.1f}"
    )

# %% [markdown]
# A detector sees what the model sees: a column to which the network gives little weight moves little inside it, so a single row with a stuck
# sensor is often let through. All rows judged together leave no doubt. In production that is the job of the [monitor](../monitor.md).
