"""Channel means and variances of one forward pass.

`Recorder` runs a model as it is; `sink` holds what a pass shows and has all the hooks; `plan` is what passes share. That is all
there is to recording. `stand_ins` and `lean` make it cost little more than a plain pass, and change no number. For compilers and
exporters there is `RecordingModule`, a copy of a model, with `behind` and `joined`.
"""

from neuralmean.recorder.module import RecordingModule
from neuralmean.recorder.recorder import Recorder
from neuralmean.recorder.sink import find_head

__all__ = ["Recorder", "RecordingModule", "find_head"]
