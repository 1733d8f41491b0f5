"""A fitted detector and its model as one graph that runs without neuralmean: ONNX, and torch's own `.pt2`.

`detector_graph` is the exported module, `writing` writes it to files, `checking` compares these with the library.
"""

from neuralmean.export.writing import METADATA_KEY, to_onnx, to_pt2

__all__ = ["METADATA_KEY", "to_onnx", "to_pt2"]
