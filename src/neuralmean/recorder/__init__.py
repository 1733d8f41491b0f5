"""Channel means and variances of one forward pass.

`Recorder` runs a model as it is; `sink` holds what a pass shows, `hooks` puts it there, and `plan` is what passes share. That is
all there is to recording. `leaving` ends a pass early. `stand_ins` and `lean` make it cost little more than a plain pass, and
change no number. For compilers and exporters there is `RecordingModule`, a copy of a model, with `behind` and `arranging`.
"""

from neuralmean.recorder.head import find_head
from neuralmean.recorder.module import RecordingModule
from neuralmean.recorder.recorder import Recorder

__all__ = ["Recorder", "RecordingModule", "find_head"]
