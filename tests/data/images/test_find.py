"""Which files of a folder are images, in which order."""

import os
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from neuralmean.data.images import Source, count_inputs, find_inputs
from neuralmean.data.images import find as find_module
from neuralmean.data.images.find import in_sorted_order
from neuralmean.errors import InputError
from tests.data.images.conftest import posix, save


class TestFinding:
    def test_a_folder_is_walked_in_the_order_of_names(self, folder):
        found = list(find_inputs(folder))
        images = [os.path.relpath(source.path, folder) for source in found if source.kind == "image"]
        assert images == ["a.jpg", "b.png", "c/1.PNG", "c/2.jpeg", "sub/deep/x.tiff", "sub/deep/y.bmp", "sub/z.webp"]

    def test_other_files_in_a_folder_are_listed_as_skipped(self, folder):
        skipped = {Path(source.path).name: source.reason for source in find_inputs(folder) if source.kind == "skipped"}
        assert skipped == {
            ".hidden.png": "it is hidden",
            "notes.txt": "it does not have the extension of an image",
            "features.npy": "it does not have the extension of an image",
        }

    def test_a_file_that_is_named_is_always_tried(self, folder):
        paths = [folder / "notes.txt", str(folder / "b.png"), folder / ".hidden.png", folder / "features.npy"]
        kinds = [source.kind for source in find_inputs(paths)]
        assert kinds == ["image", "image", "image", "array"]

    def test_paths_keep_the_order_and_the_spelling_of_the_caller(self, folder, monkeypatch):
        monkeypatch.chdir(folder)
        found = [source.path for source in find_inputs(["./b.png", "c", "a.jpg"])]
        assert found == ["./b.png", str(Path("c", "1.PNG")), str(Path("c", "2.jpeg")), "a.jpg"]

    def test_globs_are_expanded_in_order(self, folder):
        assert [Path(s.path).name for s in find_inputs(str(folder / "?.*"))] == ["a.jpg", "b.png"]
        deep = [Path(s.path).name for s in find_inputs(str(folder / "sub" / "**"))]
        assert deep == ["x.tiff", "y.bmp", "z.webp"]

    def test_a_glob_that_matches_a_folder_walks_it(self, folder):
        assert [Path(s.path).name for s in find_inputs(str(folder / "[c]"))] == ["1.PNG", "2.jpeg"]

    def test_a_name_with_brackets_that_is_there_is_not_a_glob(self, tmp_path):
        save(tmp_path / "[1].png")
        assert list(find_inputs(tmp_path / "[1].png")) == [Source(str(tmp_path / "[1].png"), "image")]

    def test_a_path_that_is_not_there_is_an_error_at_once(self, folder):
        with pytest.raises(
            InputError, match=r"Expected '.*nowhere' to be a folder, a file or a glob, but there is no such"
        ):
            find_inputs([folder, folder / "nowhere"])

    def test_a_glob_that_matches_nothing_is_an_error_at_once(self, folder):
        with pytest.raises(InputError, match=r"Expected '.*\*\.gif' to match at least one file, but it matches none"):
            find_inputs(str(folder / "*.gif"))

    def test_no_paths_are_an_error(self):
        with pytest.raises(InputError, match="Expected at least one folder, file or glob, but got none"):
            find_inputs([])

    def test_counting_counts_images_and_rows(self, folder, tmp_path):
        np.savez(tmp_path / "a.npz", images=np.zeros((12, 4, 4, 3), np.uint8))
        (tmp_path / "broken.npz").write_bytes(b"x")
        assert (
            count_inputs([folder, tmp_path / "a.npz", tmp_path / "broken.npz", folder / "notes.txt"]) == 7 + 12 + 1 + 1
        )

    @posix
    def test_a_link_to_a_folder_further_up_is_not_followed_and_another_one_is(self, tmp_path):
        save(tmp_path / "a" / "1.png")
        (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "other").symlink_to(tmp_path / "a")
        found = [(os.path.relpath(s.path, tmp_path), s.kind) for s in find_inputs([tmp_path / "b"])]
        assert found == [("b/other/1.png", "image"), ("b/other/loop", "skipped")]

    @posix
    def test_a_link_that_leads_nowhere_does_not_hide_the_others(self, tmp_path):
        save(tmp_path / "1.png")
        (tmp_path / "itself").symlink_to(tmp_path / "itself")
        (tmp_path / "gone.png").symlink_to(tmp_path / "nothing")
        found = [(Path(s.path).name, s.kind) for s in find_inputs(tmp_path)]
        assert found == [("1.png", "image"), ("gone.png", "image"), ("itself", "skipped")]

    def test_a_folder_that_cannot_be_listed_is_unreadable_and_the_rest_goes_on(self, folder, monkeypatch):
        scandir = os.scandir

        def refuse(path):
            if Path(path).name == "deep":
                raise PermissionError(13, "Permission denied")
            return scandir(path)

        monkeypatch.setattr(os, "scandir", refuse)
        found = [(Path(s.path).name, s.kind, s.reason) for s in find_inputs(folder / "sub")]
        assert found == [("deep", "unreadable", "the system reported: Permission denied"), ("z.webp", "image", "")]

    def test_folders_may_be_nested_deeper_than_python_recurses(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        place = tmp_path
        for _ in range(300):
            place = place / "d"
        place.mkdir(parents=True)
        save(place / "x.png")
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(250)
        try:
            found = [source.kind for source in find_inputs(".")]
        finally:
            sys.setrecursionlimit(limit)
        assert found == ["image"]

    def test_names_are_sorted_on_disk_just_as_in_memory(self):
        generator = np.random.default_rng(0)
        letters = ["a", "b", "\\", "\n", "n", "\udc80", "é", " "]
        names = ["".join(generator.choice(letters, size=generator.integers(1, 6))) for _ in range(1000)]
        for run in (1, 7, 999, 1000, 1001):
            assert list(in_sorted_order(iter(names), run=run)) == sorted(names)
        assert list(in_sorted_order([])) == []

    def test_a_folder_of_many_files_needs_no_more_memory_than_one_of_few(self, tmp_path, monkeypatch):
        monkeypatch.setattr(find_module, "RUN", 100)

        class Entry:
            def __init__(self, name):
                self.name = name

            def is_dir(self):
                return False

        class Folder:
            def __init__(self, n):
                self.n = n

            def __enter__(self):
                return (Entry(f"{i * 7919 % self.n:07}.png") for i in range(self.n))

            def __exit__(self, *args):
                pass

        def peak(n):
            monkeypatch.setattr(os, "scandir", lambda path: Folder(n))
            tracemalloc.start()
            last = ""
            for source in find_inputs(tmp_path):
                assert last < source.path
                last = source.path
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return peak

        # Each stretch on disk costs an open file with its buffers, and a million names of 50,000 each have 20.
        assert peak(5_000) < peak(500) + 50 * 25_000
        assert peak(500) < 1_000_000
