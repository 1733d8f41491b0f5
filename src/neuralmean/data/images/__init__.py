"""From files to batches of images: find them, decode them in other processes, preprocess them, in order.

Nothing in this package imports torch when it is imported: the worker processes that decode must start in a fraction of
a second and stay small. Tensors are made by `Preprocessing.normalise`, in the process that holds the model.
"""

from neuralmean.data.images.batches import ImageBatch, ImageBatches
from neuralmean.data.images.decode import MAX_PIXELS, Unreadable, decode_image, read_image
from neuralmean.data.images.find import Source, count_inputs, find_inputs

__all__ = [
    "MAX_PIXELS",
    "ImageBatch",
    "ImageBatches",
    "Source",
    "Unreadable",
    "count_inputs",
    "decode_image",
    "find_inputs",
    "read_image",
]
