# %% [markdown]
# # Production: service, monitor, Prometheus
#
# A detector is served over HTTP; clients send tensors or images; Prometheus reads the metrics; an alarm goes off when the stream drifts.
# Here the requests go to the application directly; `nmd serve model.nmd` puts the same application on a port.
#
# Download this page as a notebook: {nb-download}`04_production.ipynb`

# %%
import io
import time

from fastapi.testclient import TestClient
from PIL import Image

from neuralmean import Detector, Monitor
from neuralmean.cli.demo import load_data, train_model
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.service import create_app

data = load_data()
detector = Detector(train_model(data)).fit(data.train, held_out=data.held_out)
preprocessing = Preprocessing((8, 8), mean=(0.0,), std=(1.0,), channels=1)

# %% [markdown]
# ## One request


# %%
def png(image):
    """Return a tensor of shape (1, 8, 8) as the bytes of a PNG file."""
    file = io.BytesIO()
    Image.fromarray((image[0] * 255).byte().numpy()).save(file, format="PNG")
    return file.getvalue()


app = create_app(detector, preprocessing, name="digits")
with TestClient(app, base_url="http://localhost") as client:
    files = [("file", ("known.png", png(data.test[0]))), ("file", ("photo.png", png(data.far[0])))]
    answer = client.post("/score", files=files).json()
    while "nmd_inputs_total 2.0" not in (metrics := client.get("/metrics").text):
        time.sleep(0.05)  # the monitor runs on a thread of its own
for result in answer["results"]:
    print(result["path"], "is_ood:", result["is_ood"], "p-value:", round(result["p_value"], 3))

# %% [markdown]
# ## What Prometheus sees
#
# `nmd_drift == 1` is the alert to set.

# %%
print(
    "\n".join(
        line for line in metrics.splitlines() if line.startswith(("nmd_inputs_total", "nmd_ood_total", "nmd_drift "))
    )
)

# %% [markdown]
# ## The alarm, without a server
#
# `Monitor` is the test inside the service. It may look after every input, for ever: the probability that it ever raises a false alarm is
# at most `false_alarm_rate`.

# %%
monitor = Monitor(detector, false_alarm_rate=0.01)
for image in data.test[:100]:
    monitor.update(detector.predict(image[None]))
print("after 100 known digits, drift:", monitor.drift)
for number, image in enumerate(data.near[:200], start=1):
    monitor.update(detector.predict(image[None]))
    if monitor.drift:
        print(f"alarm after {number} eights and nines")
        break
