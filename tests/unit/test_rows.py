"""Reading JSONL files."""

import pytest

from molt_core.data.rows import read_rows
from molt_core.errors import ConfigError


def write(tmp_path, content: bytes):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    return path


def test_rows_are_the_lines(tmp_path):
    path = write(tmp_path, '{"q": "a\u2028b"}\r\n{"q": "é"}'.encode())
    assert read_rows(path, columns=["q"]) == [{"q": "a\u2028b"}, {"q": "é"}]


def test_max_samples_reads_no_further(tmp_path):
    assert read_rows(write(tmp_path, b'{"a": 1}\n{"a": 2}\nbroken'), max_samples=2) == [{"a": 1}, {"a": 2}]


def test_one_of_several_columns_is_enough(tmp_path):
    path = write(tmp_path, b'{"q": 1}\n{"p": 2}\n{"r": 3}\n')
    assert read_rows(path, max_samples=2, columns=["p|q"]) == [{"q": 1}, {"p": 2}]
    with pytest.raises(ConfigError, match="line 3: no column 'p' or 'q', this row has 'r'"):
        read_rows(path, columns=["p|q"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no rows"),
        (b'\xef\xbb\xbf{"a": 1}\n', "line 1: starts with a byte-order mark"),
        (b'{"a": 1}\n\n{"a": 2}\n', "line 2: the line is blank"),
        (b'{"a": 1}\n  \n', "line 2: the line is blank"),
        (b'{"a": 1}\n{"a": \n', "line 2: not valid JSON"),
        (b'{"a": 1} {"a": 2}\n', "line 1: not valid JSON"),
        (b'{"a": NaN}\n', "line 1: not valid JSON in UTF-8: NaN"),
        (b'{"a": "\xff"}\n', "line 1: not valid JSON in UTF-8"),
        (b"[" * 100_000, "line 1: not valid JSON"),
        (b"[1]\n", "line 1: expected a JSON object, got list"),
        (b'{"a": 1}\n{"b": 1, "c": 2}\n', "line 2: no column 'a', this row has 'b', 'c'"),
        (b"{}\n", "line 1: no column 'a', this row has none"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(ConfigError, match=message) as error:
        read_rows(path, columns=["a"])
    assert str(path) in str(error.value)


def test_missing_file_and_folder_are_refused(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ConfigError, match="is not a file"):
            read_rows(path)
