"""The sets that the paper uses: names, official counts, usual layouts, download addresses.

No file is opened here. `<set>` and `<split>` are placeholders in a layout's file names.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Literal

from neuralmean.bench.data.imageset import Fit
from neuralmean.bench.data.readers import (
    CIFAR10_BINARY,
    CIFAR100_BINARY,
    FOLDER,
    IDX,
    IMAGE_LIST,
    NAMED_PICTURES,
    NPY,
    NPZ,
    PYTHON_BATCHES,
    SHEETS,
    SVHN_MAT,
    Format,
)
from neuralmean.errors import InputError

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Layout:
    """Files that make up one split, relative to the data folder or to a folder with one of the set's names.

    `md5` has one sum per file, if the official files are known. `named` requires a folder with the set's name.
    """

    format: Format
    files: tuple[str, ...]
    md5: tuple[str, ...] = ()
    named: bool = False


@dataclass(frozen=True)
class Source:
    """One file of an official release and its MD5 sum; an archive is unpacked.

    `split` is the split that the file contains; None for all splits.
    """

    url: str
    md5: str
    split: Split | None = None

    @property
    def filename(self) -> str:
        """Name of the downloaded file."""
        return self.url.partition("?")[0].rpartition("/")[2]


@dataclass(frozen=True)
class DataSet:
    """One set of the paper."""

    name: str
    title: str  # the name in the paper
    folders: tuple[str, ...]  # folder names besides `name`
    counts: dict[Split, int]  # official number of images per split
    layouts: dict[Split, tuple[Layout, ...]] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()
    aliases: tuple[str, ...] = ()
    fit: Fit = "resize"
    page: str = ""

    def layouts_of(self, split: Split) -> tuple[Layout, ...]:
        """Layouts of a split, in order of preference."""
        stems = [f"{self.name}-{split}", f"{self.name}_{split}"]
        if len(self.counts) == 1:
            stems.append(self.name)
        arrays = [
            Layout(kind, (f"{stem}{suffix}",)) for stem in stems for kind, suffix in ((NPZ, ".npz"), (NPY, ".npy"))
        ]
        inside = [
            Layout(NPZ, (f"{split}.npz",), named=True),
            *(Layout(SHEETS, (f"{stem}/set.json",)) for stem in stems),
        ]
        pictures = [Layout(FOLDER, (f"{split}",), named=True), Layout(FOLDER, (f"{self.name}-{split}",))]
        if len(self.counts) == 1:
            pictures = [Layout(FOLDER, (".",), named=True)]
        return (*arrays, *inside, *self.layouts.get(split, ()), *pictures)


_ODIN = "https://github.com/facebookresearch/odin"


def _cifar10() -> DataSet:
    batches = tuple(f"data_batch_{number}" for number in range(1, 6))
    sums = (
        "c99cafc152244af753f735de768cd75f",
        "d4bba439e000b95fd0a9bffe97cbabec",
        "54ebc095f3ab1f0389bbae665268c751",
        "634d18415352ddfa80567beed471001a",
        "482c414d41f54cd18b22e5b47cb7c3cb",
    )
    return DataSet(
        name="cifar10",
        title="CIFAR-10",
        folders=("CIFAR10", "cifar-10", "CIFAR-10", "cifar-10-batches-py", "cifar-10-batches-bin", "CIFAR-10-images"),
        counts={"train": 50_000, "test": 10_000},
        layouts={
            "train": (
                Layout(PYTHON_BATCHES, batches, sums),
                Layout(CIFAR10_BINARY, tuple(f"{batch}.bin" for batch in batches)),
            ),
            "test": (
                Layout(PYTHON_BATCHES, ("test_batch",), ("40351d587109b95175f43aff81a1287e",)),
                Layout(CIFAR10_BINARY, ("test_batch.bin",)),
            ),
        },
        sources=(
            Source("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
        ),
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
    )


def _cifar100() -> DataSet:
    sums: dict[Split, str] = {"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"}
    return DataSet(
        name="cifar100",
        title="CIFAR-100",
        folders=("CIFAR100", "cifar-100", "CIFAR-100", "cifar-100-python", "cifar-100-binary"),
        counts={"train": 50_000, "test": 10_000},
        layouts={
            split: (
                Layout(PYTHON_BATCHES, (split,), (md5,), named=True),
                Layout(CIFAR100_BINARY, (f"{split}.bin",), named=True),
            )
            for split, md5 in sums.items()
        },
        sources=(
            Source("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
        ),
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
    )


def _svhn() -> DataSet:
    address = "http://ufldl.stanford.edu/housenumbers"
    sums: dict[Split, str] = {"train": "e26dedcc434d2e4c54c9b2d4a06d8373", "test": "eb5a983be6a315427106f1b164d9cef3"}
    return DataSet(
        name="svhn",
        title="SVHN",
        folders=("SVHN", "svhn-data", "svhn_data"),
        counts={"train": 73_257, "test": 26_032},
        layouts={split: (Layout(SVHN_MAT, (f"{split}_32x32.mat",), (md5,)),) for split, md5 in sums.items()},
        sources=tuple(Source(f"{address}/{split}_32x32.mat", md5, split) for split, md5 in sums.items()),
        page=f"{address}/",
    )


def _odin(
    name: str, title: str, count: int, *, archive: str, md5: str, folders: tuple[str, ...], aliases: tuple[str, ...]
) -> DataSet:
    return DataSet(
        name=name,
        title=title,
        folders=folders,
        counts={"test": count},
        sources=(Source(f"https://www.dropbox.com/s/{archive}?dl=1", md5),),
        aliases=aliases,
        fit="crop" if name.endswith("-crop") else "resize",
        page=_ODIN,
    )


def _mnist(name: str, title: str, folders: tuple[str, ...], page: str) -> DataSet:
    prefixes: dict[Split, str] = {"train": "train", "test": "t10k"}
    layouts: dict[Split, tuple[Layout, ...]] = {
        split: tuple(
            Layout(IDX, tuple(f"{prefix}-{part}-ubyte{suffix}" for part in ("images-idx3", "labels-idx1")), named=True)
            for suffix in ("", ".gz")
        )
        for split, prefix in prefixes.items()
    }
    return DataSet(name, title, folders, {"train": 60_000, "test": 10_000}, layouts, fit="keep", page=page)


def _listed(benchmark: str, file: str) -> Layout:
    """Path of OpenOOD's list of a set's pictures."""
    return Layout(IMAGE_LIST, (f"benchmark_imglist/{benchmark}/{file}.txt",))


def _imagenet(name: str, title: str, benchmark: str, counts: tuple[int, int]) -> DataSet:
    """ImageNet, as listed by OpenOOD (45,000 validation photos to test on) or in one folder per class."""
    return DataSet(
        name=name,
        title=title,
        folders=("imagenet", "ImageNet", "ILSVRC2012", "imagenet_1k") if benchmark == "imagenet" else ("imagenet_200",),
        counts={"train": counts[0], "test": counts[1]},
        layouts={
            "train": (_listed(benchmark, f"train_{benchmark}"),),
            "test": (_listed(benchmark, f"test_{benchmark}"), Layout(FOLDER, ("val",), named=True)),
        },
        page="https://www.image-net.org/",
    )


def _openood(name: str, title: str, count: int, folders: tuple[str, ...], page: str) -> DataSet:
    """An OOD set of OpenOOD's ImageNet benchmarks, as a list or a folder of pictures."""
    file = f"test_{name.replace('-', '_')}"
    layouts = (_listed("imagenet", file), _listed("imagenet200", file))
    return DataSet(name, title, folders, {"test": count}, {"test": layouts}, page=page)


_SETS = (
    _cifar10(),
    _cifar100(),
    _svhn(),
    _odin(
        "imagenet-crop",
        "imagenet-crop",
        10_000,
        archive="avgm2u562itwpkl/Imagenet.tar.gz",
        md5="7c0827e4246c3718a5ee076e999e52e5",
        folders=("Imagenet", "Imagenet_crop", "imagenet_crop", "TinyImagenet_crop"),
        aliases=("tinyimagenet-crop", "tiny-imagenet-crop"),
    ),
    _odin(
        "imagenet-resize",
        "imagenet-resize",
        10_000,
        archive="kp3my3412u5k9rl/Imagenet_resize.tar.gz",
        md5="0f9ff11d45babf2eff5fe12281d1ac31",
        folders=("Imagenet_resize", "imagenet_resize", "TinyImagenet_resize"),
        aliases=("tinyimagenet-resize", "tiny-imagenet-resize"),
    ),
    _odin(
        "lsun-crop",
        "lsun-crop",
        10_000,
        archive="fhtsw1m3qxlwj6h/LSUN.tar.gz",
        md5="458a0a0ab8e5f1cb4516d7400568e460",
        folders=("LSUN", "LSUN_C", "LSUN-C", "LSUN_crop", "lsuncrop"),
        aliases=("lsun-c", "lsun"),
    ),
    _odin(
        "lsun-resize",
        "lsun-resize",
        10_000,
        archive="moqh2wh8696c3yl/LSUN_resize.tar.gz",
        md5="278b7b31c8cb7e804a1465a8ce03a2dc",
        folders=("LSUN_resize", "LSUN_R", "LSUN-R", "lsunre"),
        aliases=("lsun-r",),
    ),
    _odin(
        "isun",
        "iSUN",
        8_925,
        archive="ssz7qxfqae0cca5/iSUN.tar.gz",
        md5="be77b0f2c26fda898afac5f99645ee70",
        folders=("iSUN", "ISUN"),
        aliases=(),
    ),
    DataSet(
        name="textures",
        title="Texture",
        folders=("dtd", "DTD", "Textures", "texture", "Texture"),
        # Papers on OOD detection use all of DTD; its own splits are for texture recognition.
        counts={"test": 5_640},
        layouts={"test": (Layout(FOLDER, ("images",), named=True), _listed("imagenet", "test_textures"))},
        sources=(
            Source(
                "https://www.robots.ox.ac.uk/~vgg/data/dtd/download/dtd-r1.0.1.tar.gz",
                "fff73e5086ae6bdbea199a49dfb8a4c1",
            ),
        ),
        aliases=("dtd", "texture"),
        page="https://www.robots.ox.ac.uk/~vgg/data/dtd/",
    ),
    _mnist("mnist", "MNIST", ("MNIST", "raw"), "http://yann.lecun.com/exdb/mnist/"),
    _mnist(
        "fashion-mnist", "Fashion-MNIST", ("FashionMNIST", "raw"), "https://github.com/zalandoresearch/fashion-mnist"
    ),
    DataSet(
        name="imagenet-photos",
        title="ImageNet photos",
        folders=(),
        counts={"train": 1_000, "test": 600},
        layouts={
            "train": (Layout(NAMED_PICTURES, ("train",), named=True),),
            "test": (Layout(NAMED_PICTURES, ("val",), named=True),),
        },
        fit="keep",
        page="https://www.image-net.org/",
    ),
    _imagenet("imagenet-1k", "ImageNet-1K", "imagenet", (1_281_167, 45_000)),
    _imagenet("imagenet-200", "ImageNet-200", "imagenet200", (260_000, 9_000)),
    _openood("ssb-hard", "SSB-hard", 49_000, ("ssb_hard",), "https://github.com/sgvaze/SSB"),
    _openood("ninco", "NINCO", 5_879, ("NINCO",), "https://github.com/j-cb/NINCO"),
    _openood(
        "inaturalist", "iNaturalist", 10_000, ("iNaturalist",), "https://github.com/deeplearning-wisc/large_scale_ood"
    ),
    _openood("openimage-o", "OpenImage-O", 15_869, ("openimage_o",), "https://github.com/haoqiwang/vim"),
)
_BY_NAME = {dataset.name: dataset for dataset in _SETS}
_BY_ALIAS = {alias: dataset for dataset in _SETS for alias in (dataset.name, *dataset.aliases)}


def names() -> list[str]:
    """Names of the sets, in the order of the paper."""
    return list(_BY_NAME)


def dataset(name: str) -> DataSet:
    """Look up a set by its name or another common name.

    The paper's names "ImageNet-C" and "ImageNet-R" are not accepted: today they mean corrupted and rendered images.

    Example:
        >>> dataset("TinyImageNet-crop").name, dataset("CIFAR-10").name
        ('imagenet-crop', 'cifar10')
    """
    key = name.lower().replace("_", "-")
    found = _BY_ALIAS.get(key) or _BY_ALIAS.get(key.replace("-", ""))
    if found is None:
        close = difflib.get_close_matches(key, _BY_ALIAS, n=3)
        hint = f"Did you mean {' or '.join(map(repr, close))}?" if close else f"Known sets: {', '.join(_BY_NAME)}."
        raise InputError(f"Expected the name of a data set, but got {name!r}. {hint}")
    return found


def check_split(found: DataSet, split: str) -> Split:
    """Return `split`, or raise if the set has no such split."""
    for known in found.counts:
        if split == known:
            return known
    raise InputError(
        f"Expected the split of {found.name!r} to be {' or '.join(map(repr, found.counts))}, but got {split!r}."
    )
