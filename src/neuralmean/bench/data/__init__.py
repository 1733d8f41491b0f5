"""The image sets of the paper: finds them on disk in the usual layouts, checks, downloads and reads them."""

from neuralmean.bench.data.altered import ALTERATIONS, alter
from neuralmean.bench.data.downloads import download, fetch, unpack
from neuralmean.bench.data.imageset import SIZE, ImageSet
from neuralmean.bench.data.inventory import Entry, Located, find, load, locate, read
from neuralmean.bench.data.registry import DataSet, Source, dataset, names

__all__ = [
    "ALTERATIONS",
    "SIZE",
    "DataSet",
    "Entry",
    "ImageSet",
    "Located",
    "Source",
    "alter",
    "dataset",
    "download",
    "fetch",
    "find",
    "load",
    "locate",
    "names",
    "read",
    "unpack",
]
