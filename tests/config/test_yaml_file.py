"""YAML reader: what is refused, and the keys that a reference may name."""

import time
from pathlib import Path

import pytest

from megatron.config.yaml_file import read_yaml

CHAIN = "k0: xx\n" + "".join(f"k{i + 1}: '${{k{i}}}${{k{i}}}'\n" for i in range(40))  # 2^41 letters
# text of a file, and a part of the sentence
REFUSED = [
    ("a: &a [1]\nb: *a\n", "got the anchor or alias 'a', expected none. Write the value out"),
    ("a: *b\n", "got the anchor or alias 'b', expected none"),
    ("a: {<<: {b: 1}}\n", "tag:yaml.org,2002:merge"),
    ("a: !!python/object/apply:os.system ['true']\n", "python/object/apply:os.system"),
    ("b: 1\na: !!int x\n", "got invalid YAML (invalid literal"),
    ("a: !!bool maybe\n", "got invalid YAML ('maybe')"),
    ("a: !!float ''\n", "got invalid YAML (string index"),
    (f"a: {'9' * 5000}\n", "got invalid YAML (Exceeds the limit"),
    ('a: "\\UFFFFFFFF"\n', "got invalid YAML"),
    ("a: " + "[" * 10_000, "got invalid YAML (maximum recursion"),
    ("\tx: 1", "cannot start any token"),
    ("a: [", 'in "<unicode string>", line 1, column 5'),
    ("a: 1\n---\nb: 1\n", "single document"),
    ("a: 1\na: 2\n", "got the key 'a', expected different words"),
    ("? [a]\n: 1\n", "got the key ['a']"),
    ("{null: 1}\n", "got the key None"),
    ("- a\n", "got list, expected sections with keys"),
    ("x" * (5 << 20), "more than 4 MiB"),
    (CHAIN, "with a key of this file that has a short word or a number"),
    ("a: ${b}\nb: ${a}\n", "a: got '${b}', expected ${key}"),
    ("a: ${nowhere}\n", "a: got '${nowhere}', expected ${key}"),
    ("a: ${b.c}\nb: 1\n", "a: got '${b.c}', expected ${key}"),
    ("a: x${b}\nb: {c: 1}\n", "a: got 'x${b}', expected ${key}"),
]
# references to others than keys of the file; the environment has SECRET_TOKEN=hunter2
SECRETS = [
    "${oc.env:SECRET_TOKEN}", "x${oc.env:SECRET_TOKEN}", "${oc.env:NOT_SET,fallback}", "${env:SECRET_TOKEN}",
    "${${b}}", "${b", "${}", "${.b}", "${b:c}", "${b[0]}",
]  # fmt: skip
REFUSED_WORDS = [
    ("optim.lr", "expected section.key=value"),
    ("=1", "expected section.key=value"),
    ("optim.=1", "expected section.key=value"),
    ("x=" + "[" * 10_000, "x: got invalid YAML"),
    ("x=[", "x: got invalid YAML"),
    (".".join("a" * 100) + "=1", "expected section.key=value"),
    *((f"logging.run_dir={secret}", "logging.run_dir=$HOME/") for secret in SECRETS),
]


def write_yaml(folder: Path, text: str) -> Path:
    path = folder / "f.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "words", "sentence"),
    [
        *((text, (), sentence) for text, sentence in REFUSED),
        *((f"b: 1\na: '{secret}'\n", (), "Let the shell expand other names: a=$HOME/") for secret in SECRETS),
        *(("b: [1]\n", [word], sentence) for word, sentence in REFUSED_WORDS),
    ],
    ids=lambda text: repr(text)[:30],
)
def test_a_hostile_file_or_override_is_refused_quickly_and_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: list[str], sentence: str
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    begin = time.process_time()
    with pytest.raises(ValueError) as caught:
        read_yaml(write_yaml(tmp_path, text), words)
    message = str(caught.value)
    assert sentence in message and "\n" not in message and "hunter2" not in message
    assert (words or str(tmp_path / "f.yaml") in message) and time.process_time() - begin < 30


def test_bytes_that_are_not_utf8_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_yaml(tmp_path / "f.yaml")
    with pytest.raises(FileNotFoundError, match="no such configuration file"):
        read_yaml(tmp_path / "none.yaml")


def test_references_are_resolved_after_overrides(tmp_path: Path) -> None:
    text = "directory: /d\nn: 3\ns: {x: 1.5}\nt: '${directory}/a-${n}'\nu: ['${n}']\nv: ${s.x}\n"
    values = read_yaml(write_yaml(tmp_path, text + "z: $HOME\n"), ["directory=/e", "s.x=2"])
    assert (values["t"], values["z"]) == ("/e/a-3", "$HOME")
    assert values["u"] == [3] and values["v"] == 2  # a reference alone keeps the type


def test_numbers_follow_yaml_1_2_and_dates_are_strings(tmp_path: Path) -> None:
    text = "a: 1e6\nb: 1_000\nc: 2024-01-31\nd: 0.16M\ne: -.5\nf: 1E-3\ng: 1e\nh: .inf\ni: !!float 1e-7\n"
    expected = {"a": 1e6, "b": 1000, "c": "2024-01-31", "d": "0.16M", "e": -0.5, "f": 1e-3, "g": "1e"}
    assert read_yaml(write_yaml(tmp_path, text)) == {**expected, "h": float("inf"), "i": 1e-7}


def test_overrides_are_merged_section_by_section(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, "a: {b: 1, c: [1, 2]}\nd: 5\n")
    words = ["a.b=2", "a.c=[3]", "d=null", "e.f.g=", "a={h: 1e3}"]
    expected = {"a": {"b": 2, "c": [3], "h": 1000.0}, "d": None, "e": {"f": {"g": None}}}
    assert read_yaml(path, words) == expected
