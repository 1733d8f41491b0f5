"""A fitted detector and its model as one graph that runs without neuralmean: ONNX, and torch's own `.pt2`.

`writing` writes the files; `detector_graph` is what they hold. The others rewrite an ONNX graph so that runtimes are quick with
it.
"""

from neuralmean.export.arranging import arrange
from neuralmean.export.writing import METADATA_KEY, to_onnx, to_pt2

__all__ = ["METADATA_KEY", "arrange", "to_onnx", "to_pt2"]
