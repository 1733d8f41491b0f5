"""Channel means and variances of one forward pass.

`Recorder` runs a model as it is; `sink` holds what a pass shows and has all the hooks. `RecordingModule` is a copy of a model for
compilers and exporters. `plan`, `stand_ins` and `lean` are what makes a recorded pass cost little more than a plain one.
"""

from neuralmean.recorder.module import RecordingModule
from neuralmean.recorder.recorder import Recorder
from neuralmean.recorder.sink import find_head

__all__ = ["Recorder", "RecordingModule", "find_head"]
