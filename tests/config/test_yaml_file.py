"""YAML reader: what is refused, and the keys that a reference may name."""

import time
from pathlib import Path

import pytest

from megatron.config.yaml_file import read_yaml

CHAIN = "k0: xx\n" + "".join(f"k{i + 1}: '${{k{i}}}${{k{i}}}'\n" for i in range(40))  # 2^41 letters


def write_yaml(folder: Path, text: str) -> Path:
    path = folder / "f.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: &a [1]\nb: *a\n", "got the anchor or alias 'a', expected none. Write the value out"),
        ("a: *b\n", "got the anchor or alias 'b', expected none"),
        ("a: {<<: {b: 1}}\n", "tag:yaml.org,2002:merge"),
        (CHAIN, "more than 4096 letters"),
        ("a: ${b}\nb: ${a}\n", "refers to itself"),
        ("a: " + "[" * 100_000, "too many nested levels"),
        ("a: !!python/object/apply:os.system ['true']\n", "tag:yaml.org,2002:python/object/apply:os.system"),
        ("b: 1\na: !!timestamp x\n", 'in "<unicode string>", line 2'),
        (
            "b: 1\na: !!int x\n",
            "got 'x', expected a value of type int in \"<unicode string>\", line 2",
        ),
        ("a: !!bool maybe\n", "got 'maybe', expected a value of type bool"),
        ("a: !!float ''\n", "got '', expected a value of type float"),
        ("a: !!float [1]\n", "expected a scalar node"),
        (f"a: {'9' * 5000}\n", "expected a value of type int"),
        (f"a: {10**30}\n", "expected a number below 2^63"),
        ('a: "\\UFFFFFFFF"\n', "too large"),
        ("a: 1\na: 2\n", "got the key 'a', expected different words"),
        ("? [a]\n: 1\n", "got the key ['a']"),
        ("{null: 1}\n", "got the key None"),
        ("- a\n", "got list, expected sections with keys"),
        ("\tx: 1", "cannot start any token"),
        ("a: 1\n---\nb: 1\n", "single document"),
        ("x" * (5 << 20), "more than 4 MiB"),
        ("a: ${nowhere}\n", "in which nowhere is no word or number of this file"),
        ("a: ${b.c}\nb: 1\n", "in which b.c is no word"),
        ("a: x${b}\nb: {c: 1}\n", "in which b is no word"),
    ],
    ids=lambda text: repr(text[:30]),
)
def test_a_hostile_file_is_refused_quickly_and_in_one_sentence(
    tmp_path: Path, text: str, sentence: str
) -> None:
    begin = time.process_time()
    with pytest.raises(ValueError) as caught:
        read_yaml(write_yaml(tmp_path, text))
    assert sentence in str(caught.value) and str(tmp_path / "f.yaml") in str(caught.value)
    assert "\n" not in str(caught.value) and time.process_time() - begin < 30


def test_bytes_that_are_not_utf8_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_yaml(tmp_path / "f.yaml")
    with pytest.raises(FileNotFoundError, match="no such configuration file"):
        read_yaml(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    "secret",
    ["${oc.env:SECRET_TOKEN}", "x${oc.env:SECRET_TOKEN}", "${oc.env:NOT_SET,fallback}", "${env:SECRET_TOKEN}",
     "${${b}}", "${b", "${}", "${.b}", "${b:c}", "${b[0]}"],
)  # fmt: skip
def test_a_reference_may_name_only_keys_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    path = write_yaml(tmp_path, f"b: 1\nlogging: {{run_dir: '{secret}'}}\n")
    for words in ([], [f"logging.run_dir={secret}"]):
        with pytest.raises(ValueError) as caught:
            read_yaml(path, words)
        assert "hunter2" not in str(caught.value)
        assert "logging.run_dir" in str(caught.value) and "logging.run_dir=$HOME/" in str(caught.value)


def test_references_are_resolved_after_overrides(tmp_path: Path) -> None:
    text = "directory: /d\nn: 3\ns: {x: 1.5}\nt: '${directory}/a-${n}'\nu: ['${n}']\nv: ${s.x}\ny: '${t}/b'\n"
    values = read_yaml(write_yaml(tmp_path, text + "z: $HOME\n"), ["directory=/e", "s.x=2"])
    assert (values["t"], values["y"], values["z"]) == ("/e/a-3", "/e/a-3/b", "$HOME")
    assert values["u"] == [3] and values["v"] == 2  # a reference alone keeps the type


def test_numbers_follow_yaml_1_2_and_dates_are_strings(tmp_path: Path) -> None:
    text = "a: 1e6\nb: 1_000\nc: 2024-01-31\nd: 0.16M\ne: -.5\nf: 1E-3\ng: 1e\nh: .inf\ni: !!float 1e-7\n"
    expected = {"a": 1e6, "b": 1000, "c": "2024-01-31", "d": "0.16M", "e": -0.5, "f": 1e-3, "g": "1e"}
    assert read_yaml(write_yaml(tmp_path, text)) == {**expected, "h": float("inf"), "i": 1e-7}


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("optim.lr", "expected section.key=value"),
        ("=1", "expected section.key=value"),
        ("optim.=1", "expected section.key=value"),
        ("a.b=1", "a: got keys, expected a list"),
        ("x=" + "[" * 100_000, "nested levels"),
        ("x=[", "x: "),
        (".".join("a" * 100) + "=1", "expected section.key=value"),
    ],
    ids=lambda text: text[:20],
)
def test_a_hostile_override_is_refused_in_one_sentence(tmp_path: Path, word: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_yaml(write_yaml(tmp_path, "a: [1]\n"), [word])
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_overrides_are_merged_section_by_section(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, "a: {b: 1, c: [1, 2]}\nd: 5\n")
    words = ["a.b=2", "a.c=[3]", "d=null", "e.f.g=", "a={h: 1e3}"]
    expected = {"a": {"b": 2, "c": [3], "h": 1000.0}, "d": None, "e": {"f": {"g": None}}}
    assert read_yaml(path, words) == expected
