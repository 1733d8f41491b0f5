"""The decoding process: reads tasks from standard input, writes pixels to standard output.

A task is some files or some rows of an array file; the answer is their uint8 pixels, resized and cropped, and a reason
for each that could not be read. Frames are a JSON header and raw bytes: nothing is pickled. The same `answer` serves
the main process when there are no workers. Torch must not be imported here.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import warnings
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from neuralmean.data.images.arrays import ArrayFile
from neuralmean.data.images.decode import open_image
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import InputError

__all__ = ["Answer", "Decoder", "Task", "main", "read_frame", "write_frame"]

_LENGTHS = struct.Struct(">IQ")


@dataclass(frozen=True)
class Task:
    """Images to decode: files, or the rows from `start` on of one array file."""

    names: tuple[str, ...]
    array: str | None = None
    start: int = 0

    def split(self) -> list[Task]:
        """One task for each image."""
        return [Task((name,), self.array, self.start + i) for i, name in enumerate(self.names)]


@dataclass(frozen=True)
class Answer:
    """The result of a task: the pixels of the readable images, in order, and the reasons for the others."""

    pixels: list[NDArray[np.uint8]]  # runs of images of one size, each (n, H, W, C)
    failures: dict[int, str]  # by position in the task


class Decoder:
    """Runs tasks; keeps the last array file open, as tasks are in increasing order of rows."""

    def __init__(self, preprocessing: Preprocessing, max_pixels: int) -> None:
        self._preprocessing, self._max_pixels = preprocessing, max_pixels
        self._file: ArrayFile | None = None

    def answer(self, task: Task) -> Answer:
        """Decode every image of the task."""
        return self._rows(task, task.array) if task.array is not None else self._files(task)

    def close(self) -> None:
        """Close the array file, if one is open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _files(self, task: Task) -> Answer:
        images: list[NDArray[np.uint8]] = []
        failures: dict[int, str] = {}
        for place, name in enumerate(task.names):
            try:
                images.append(self._preprocessing.pixels(open_image(name, self._max_pixels)))
            except InputError as error:
                failures[place] = str(error)
            except MemoryError:
                failures[place] = "there is not enough memory to unpack it"
        return Answer(_runs(images), failures)

    def _rows(self, task: Task, path: str) -> Answer:
        try:
            if self._file is None or self._file.path != path:
                self.close()
                self._file = ArrayFile(path)
            rows = self._file.read(task.start, task.start + len(task.names))
            return Answer([self._preprocessing.array_pixels(rows)], {})
        except InputError as error:
            return Answer([], dict.fromkeys(range(len(task.names)), str(error)))


def _runs(images: list[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
    """Stack neighbours of one shape."""
    runs: list[list[NDArray[np.uint8]]] = []
    for image in images:
        if runs and runs[-1][0].shape == image.shape:
            runs[-1].append(image)
        else:
            runs.append([image])
    return [np.stack(run) for run in runs]


def write_frame(stream: IO[bytes], header: dict[str, Any], arrays: list[NDArray[np.uint8]] | None = None) -> None:
    """Write a header and the bytes of some arrays, whose shapes go into the header."""
    arrays = [np.ascontiguousarray(array) for array in arrays or []]
    text = json.dumps({**header, "shapes": [array.shape for array in arrays]}).encode("ascii")
    stream.write(_LENGTHS.pack(len(text), sum(array.nbytes for array in arrays)))
    stream.write(text)
    for array in arrays:
        stream.write(array.reshape(-1).data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[dict[str, Any], list[NDArray[np.uint8]]] | None:
    """Read what `write_frame` wrote; None at the end of the stream, also in the middle of a frame."""
    try:
        n_text, n_bytes = _LENGTHS.unpack(_read(stream, _LENGTHS.size))
        header = json.loads(_read(stream, n_text))
        body = np.frombuffer(_read(stream, n_bytes), np.uint8)
    except EOFError:
        return None
    arrays, begin = [], 0
    for shape in header["shapes"]:
        end = begin + int(np.prod(shape))
        arrays.append(body[begin:end].reshape(shape))
        begin = end
    return header, arrays


def _read(stream: IO[bytes], n: int) -> bytearray:
    buffer = bytearray(n)
    view = memoryview(buffer)
    while view:
        got = stream.readinto(view)  # type: ignore[attr-defined]
        if not got:
            raise EOFError
        view = view[got:]
    return buffer


def task_header(task: Task) -> dict[str, Any]:
    """A task as JSON."""
    return {"names": task.names, "array": task.array, "start": task.start}


def main() -> None:
    """Answer tasks until standard input ends."""
    # Keep library output out of the frames.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        warnings.simplefilter("ignore")
        frame = read_frame(sys.stdin.buffer)
        if frame is None:
            return
        decoder = Decoder(Preprocessing.from_json(frame[0]["preprocessing"]), frame[0]["max_pixels"])
        write_frame(answers, {"ready": True})
        while (frame := read_frame(sys.stdin.buffer)) is not None:
            header = frame[0]
            answer = decoder.answer(Task(tuple(header["names"]), header["array"], header["start"]))
            try:
                write_frame(answers, {"failures": list(answer.failures.items())}, answer.pixels)
            except BrokenPipeError:
                # The reader is gone; closing would write the rest again.
                os._exit(0)
        decoder.close()
