"""Tells you when a PyTorch model is looking at something it was not trained for.

from neuralmean import Detector

detector = Detector(model).fit(id_data, held_out=unseen_id_data)
output, decision = detector(x)
decision.is_ood, decision.p_value
"""

from neuralmean.calibration import Calibration
from neuralmean.decision import Decision, Explanation
from neuralmean.detector import Detector
from neuralmean.errors import NeuralMeanError, NeuralMeanWarning
from neuralmean.layers import Layer, select_layers
from neuralmean.moments import Moments
from neuralmean.monitor import Monitor
from neuralmean.reference import Reference
from neuralmean.synthesis import permute_blocks
from neuralmean.version import __version__

__all__ = [
    "Calibration",
    "Decision",
    "Detector",
    "Explanation",
    "Layer",
    "Moments",
    "Monitor",
    "NeuralMeanError",
    "NeuralMeanWarning",
    "Reference",
    "__version__",
    "permute_blocks",
    "select_layers",
]
