"""A fitted detector and its model as one graph that runs without neuralmean: ONNX, and torch's own `.pt2`.

`detector_graph` is what the files hold, `writing` writes them, `checking` compares them with the library before they are kept.
"""

from neuralmean.export.writing import METADATA_KEY, to_onnx, to_pt2

__all__ = ["METADATA_KEY", "to_onnx", "to_pt2"]
