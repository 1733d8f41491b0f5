"""Limits are checked once, and the token is neither guessable nor shown."""

import re

import pytest

from neuralmean.errors import InputError
from neuralmean.service.settings import Settings, is_authorised, read_token

TOKEN = "correct-horse-battery"


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"], ids=repr)
def test_counts_must_be_whole_numbers(value):
    message = f"Expected `max_batch` to be a whole number of at least 1, but got {value!r}."
    with pytest.raises(InputError, match=re.escape(message)):
        Settings(max_batch=value)


def test_other_settings_out_of_range_are_refused():
    with pytest.raises(InputError, match="Expected `timeout_s` to be a number of at least 0, but got -1"):
        Settings(timeout_s=-1)
    with pytest.raises(InputError, match=r"Expected `queue` to be at least `max_batch` \(64\), but got 3"):
        Settings(queue=3)
    with pytest.raises(InputError, match=r"Expected only the options .* but got \['max_bach'\]"):
        Settings.from_options(max_bach=3)


def test_the_token_is_not_in_the_repr():
    assert TOKEN not in repr(Settings(token=TOKEN))
    assert "token='***'" in repr(Settings(token=TOKEN)).replace("***", "'***'")


def test_a_token_comes_from_the_argument_a_file_or_the_environment(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert read_token(TOKEN, None, {"NMD_TOKEN": "something-else"}) == TOKEN
    assert read_token(None, file, {"NMD_TOKEN": "something-else"}) == TOKEN
    assert read_token(None, None, {"NMD_TOKEN": TOKEN}) == TOKEN
    assert read_token(None, None, {}) is None


def test_a_token_that_cannot_be_used_is_refused_without_showing_it(tmp_path):
    with pytest.raises(InputError, match="Expected a token or a file that holds it, but got both"):
        read_token(TOKEN, tmp_path / "x", {})
    with pytest.raises(InputError, match=r"Expected to read the token from .* but No such file or directory"):
        read_token(None, tmp_path / "x", {})
    for bad in ("short", "with space in it", "", "geheimnis-ü-geheim"):
        with pytest.raises(InputError, match="Expected the token to be at least 8 printable ASCII") as caught:
            read_token(bad, None, {})
        assert not bad or bad not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "passes"),
    [
        (f"Bearer {TOKEN}", True),
        (f"bearer  {TOKEN} ", True),
        (f"Basic {TOKEN}", False),
        (f"Bearer {TOKEN}x", False),
        (TOKEN, False),
        ("", False),
        ("Bearer ", False),
    ],
)
def test_only_the_right_token_passes(header, passes):
    assert is_authorised(header.encode(), TOKEN) is passes
    assert not is_authorised(None, TOKEN)


def test_a_token_of_no_end_or_of_another_type_is_refused(tmp_path):
    endless = tmp_path / "token"
    endless.write_text("a" * 5000)
    with pytest.raises(InputError, match="a token of at most 4096 characters"):
        read_token(None, endless, {})
    with pytest.raises(InputError, match="Expected the token to be a text, but got int"):
        Settings(token=5)
