"""Recording: channel means and variances of one forward pass.

There are two ways to read a pass. `Recorder` runs the model itself, with hooks: `plan` holds what passes share, `sink`
collects one pass, `exits` ends a pass early. `RecordingModule` is the model and its reductions as one module of tensors,
from which `torch.compile`, `torch.export` and everything in `recording.graph` start.
"""

from neuralmean.recording.head import find_head
from neuralmean.recording.module import RecordingModule
from neuralmean.recording.recorder import Recorder

__all__ = ["Recorder", "RecordingModule", "find_head"]
