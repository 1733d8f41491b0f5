"""Tells you when a PyTorch model is looking at something it was not trained for.

from neuralmean import Detector

detector = Detector(model).fit(id_data, held_out=unseen_id_data)
output, decision = detector(x)
decision.is_ood, decision.p_value
"""

__version__ = "0.1.0"

from neuralmean.data.augmentation import permute_blocks
from neuralmean.detector.decision import Decision, Explanation
from neuralmean.detector.detector import Detector
from neuralmean.errors import NeuralMeanError, NeuralMeanWarning
from neuralmean.models.layers import Layer, select_layers
from neuralmean.monitor.monitor import Monitor
from neuralmean.recording.reference import Reference
from neuralmean.stats.calibration import Calibration
from neuralmean.stats.moments import Moments

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
