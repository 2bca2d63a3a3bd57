"""YAML reader: limits, and the keys that a reference may name."""

import time
from pathlib import Path

import pytest
import yaml

from megatron.config.yaml_file import MAX_DEPTH, MAX_NODES, read_yaml

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)  # 9^9 values in 300 bytes
CHAIN = "k0: xx\n" + "".join(f"k{i + 1}: '${{k{i}}}${{k{i}}}'\n" for i in range(40))  # 2^41 letters
SECTIONS = "s0: [x, x]\n" + "".join(f"s{i + 1}: ['${{s{i}}}', '${{s{i}}}']\n" for i in range(40))
MERGES = "m0: &m0 {a: 1}\n" + "".join(
    f"m{i + 1}: &m{i + 1} {{<<: [*m{i}, *m{i}], b{i}: *m{i}}}\n" for i in range(40)
)


def write_yaml(folder: Path, text: str) -> Path:
    path = folder / "f.yaml"
    path.write_text(text)
    return path


def list_of_values(n: int) -> str:
    """Return YAML with exactly `n` nodes: the mapping, its key, the list and n - 3 values."""
    return "a:\n" + "- 1\n" * (n - 3)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (BOMB, "with aliases expanded"),
        (CHAIN, "references expanded"),
        (SECTIONS, "references expanded"),
        (MERGES, "with aliases expanded"),
        ("a: &a [*a]\n", "alias *a, expected one of an earlier"),
        ("a: *b\n", "alias *b, expected one of an earlier"),
        ("a: ${b}\nb: ${a}\n", "nested levels"),
        ("a: ${a}\n", "nested levels"),
        ("a: {b: '${a}'}\n", "nested levels"),
        ("a: " + "[" * 100_000, "nested levels"),
        ("a: " + "{b: " * 100_000, "nested levels"),
        ("".join(" " * i + f"k{i}:\n" for i in range(MAX_DEPTH + 2)), "nested levels"),
        ("a: !!python/object/apply:os.system ['true']\n", "got the tag"),
        ("b: 1\na: !!timestamp x\n", '!!bool in "<unicode string>", line 2'),
        ("b: 1\na: !!int x\n", "got 'x', expected a value of type int in \"<unicode string>\", line 2"),
        ("a: !!bool maybe\n", "got 'maybe', expected a value of type bool"),
        ("a: !!float ''\n", "got '', expected a value of type float"),
        ("a: !!float [1]\n", "expected a scalar node"),
        ("a: 0x_\n", "got '0x_', expected a value of type int"),
        (f"a: {'9' * 5000}\n", "expected a value of type int"),
        ('a: "\\UFFFFFFFF"\n', "too large"),
        (f"a: {10**30}\n", "expected one below 2^63"),
        ("a: 1\na: 2\n", "duplicate key a"),
        ("a: {<<: {b: 1}, b: 1, b: 2}\n", "duplicate key b"),
        ("{.nan: 1}\n", "a key that is not a word or number"),
        ("{null: 1}\n", "a key that is not a word or number"),
        ("? [a]\n: 1\n", "a key that is not a word or number"),
        ("a: 1\n---\nb: 1\n", "single document"),
        ("x" * (5 << 20), "more than 4 MiB"),
        ("a: ${nowhere}\n", "'nowhere' is none"),
        ("a: ${b.c}\nb: 1\n", "'b.c' is none"),
        ("a: ${b.7}\nb: [1]\n", "'b.7' is none"),
        ("a: x${b}\nb: {c: 1}\n", "in which b is dict"),
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
    assert "\n" not in str(caught.value)
    assert time.process_time() - begin < 30


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_yaml(tmp_path / "f.yaml")


@pytest.mark.slow
def test_the_limit_of_values_is_exact(tmp_path: Path) -> None:
    assert len(read_yaml(write_yaml(tmp_path, list_of_values(MAX_NODES)))["a"]) == MAX_NODES - 3
    with pytest.raises(ValueError, match=f"more than {MAX_NODES:,} values"):
        read_yaml(write_yaml(tmp_path, list_of_values(MAX_NODES + 1)))


@pytest.mark.parametrize(
    "secret",
    [
        "${oc.env:SECRET_TOKEN}", "x${oc.env:SECRET_TOKEN}", "${oc.env:NOT_SET,fallback}", "${oc.decode:'1'}",
        "${oc.create:[1]}", "${oc.select:b}", "${oc.dict.keys:b}", "${oc.deprecated:b}",
        "${env:SECRET_TOKEN}",
        "${${b}}", "${b", "${}", "${.b}", "${oc.env:${b}}", "${b:c}", "${b[0]}",
    ],
)  # fmt: skip
def test_a_reference_may_name_only_keys_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    path = write_yaml(tmp_path, f"b: 1\nlogging: {{run_dir: '{secret.replace(chr(39), chr(39) * 2)}'}}\n")
    with pytest.raises(ValueError) as caught:
        read_yaml(path)
    assert "hunter2" not in str(caught.value)
    assert "logging.run_dir" in str(caught.value) and "logging.run_dir=$HOME/" in str(caught.value)
    with pytest.raises(ValueError) as caught:  # also not from the command line
        read_yaml(write_yaml(tmp_path, "b: 1\n"), [f"logging.run_dir={secret}"])
    assert "hunter2" not in str(caught.value)


def test_references_are_resolved_after_overrides(tmp_path: Path) -> None:
    text = "directory: /d\nn: 3\ns: {x: 1.5, 7: z, l: [a, b]}\nt: '${directory}/a-${n}'\nu: ${n}\nv: ${s}\n"
    path = write_yaml(tmp_path, text + "w: ${s.7}\nx: ${s.l.1}\ny: '${t}/b'\nz: $HOME\n")
    values = read_yaml(path, ["directory=/e", "s.x=2"])
    assert values["t"] == "/e/a-3" and values["y"] == "/e/a-3/b" and values["u"] == 3
    assert values["v"] == {"x": 2, 7: "z", "l": ["a", "b"]} and values["v"] is not values["s"]
    assert values["w"] == "z" and values["x"] == "b" and values["z"] == "$HOME"


def test_anchors_within_the_limits_are_read_as_yaml_defines_them(tmp_path: Path) -> None:
    text = "a: &a {x: 1, y: [1, 2]}\nb: *a\nc: {<<: *a, x: 3}\nd: [*a, *a]\n"
    assert read_yaml(write_yaml(tmp_path, text)) == yaml.safe_load(text)


def test_numbers_follow_yaml_1_2_and_dates_are_strings(tmp_path: Path) -> None:
    text = "a: 1e6\nb: 1_000\nc: 2024-01-31\nd: 0.16M\ne: -.5\nf: 1E-3\ng: 1e\nh: .inf\n"
    expected = {"a": 1e6, "b": 1000, "c": "2024-01-31", "d": "0.16M", "e": -0.5, "f": 1e-3, "g": "1e"}
    assert read_yaml(write_yaml(tmp_path, text)) == {**expected, "h": float("inf")}


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("optim.lr", "expected section.key=value"),
        ("=1", "expected section.key=value"),
        ("optim.=1", "expected section.key=value"),
        ("a.b=1", "a: got keys, expected a list"),
        ("x=" + "[" * 100_000, "nested levels"),
        ("x=[", "x: "),
        (".".join("a" * 100) + "=1", "nested levels"),
    ],
    ids=lambda text: text[:20],
)
def test_a_hostile_override_is_refused_in_one_sentence(tmp_path: Path, word: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_yaml(write_yaml(tmp_path, "a: [1]\n"), [word])
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_overrides_are_merged_section_by_section(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, "a: {b: 1, c: [1, 2]}\nd: 5\n")
    assert read_yaml(path, ["a.b=2", "a.c=[3]", "d=null", "e.f.g=", "a={h: 1e3}"]) == {
        "a": {"b": 2, "c": [3], "h": 1000.0},
        "d": None,
        "e": {"f": {"g": None}},
    }
