"""Launch scripts are read without being run."""

import subprocess
from pathlib import Path

import pytest

from megatron.config.migration.arithmetic import evaluate_integer
from megatron.config.migration.launch_script import LaunchScript, read_launch_script
from megatron.config.migration.megatron_command import translate_command
from megatron.config.migration.shell_tests import evaluate_test

# the constructs of the scripts that the code bases publish: arrays, arithmetic, here-documents, continuations
SCRIPT = r"""#!/bin/bash
#SBATCH --nodes=2
export MASTER_PORT=$((RANDOM%16384+49152))  # a random port
NAME=trial
EMPTY=""
OUT=runs/$NAME; GPUS=${GPUS:-4}
SHAPE=(64 256 16 4 2)
MODEL=("${SHAPE[@]}")
SEQ=128
SAMPLES=$((8*SEQ*10/SEQ))
if [ -n "$EMPTY" ]; then
    SEQ=999
elif [[ "$NAME" == "trial" ]]; then
    CLIP=0.5
else
    CLIP=9
fi
EXTRA="--clip-grad $CLIP \
    --log-interval 5"
mkdir -p ds
cat <<EOF > ds/$NAME.json
{"zero_optimization": {"stage": 1}, "train_batch_size": $((4*2))}
EOF
ARGS=" \
    --num-layers ${MODEL[4]} --hidden-size ${MODEL[0]} \
    --num-attention-heads ${MODEL[3]} --seq-length $SEQ \
    --max-position-embeddings $SEQ $EXTRA \
    "
ARGS+=" --train-samples $SAMPLES"
DATA=(
    --data-path 0.3 'data/a b' 0.7 data/c  # two corpora
    --split 100
)
cmd="torchrun --nproc_per_node $GPUS --nnodes 2 --master_port $MASTER_PORT"
$cmd ../pretrain_gpt.py $ARGS "${DATA[@]}" --lr 1e-3 --global-batch-size 8 --swiglu --save "$OUT" \
    --deepspeed --deepspeed_config ds/${NAME}.json 2>&1 | tee $OUT/log
"""


def read(tmp_path: Path, text: str, **given: str) -> list[str]:
    path = tmp_path / "train.sh"
    path.write_text(text)
    return read_launch_script(path, given)[0]


def test_a_script_gives_the_words_that_bash_would_pass(tmp_path: Path) -> None:
    words = read(tmp_path, SCRIPT)
    # bash itself, with the launcher replaced by one that prints its arguments
    shown = SCRIPT.replace(
        'cmd="torchrun', 'torchrun() { printf "%s\\n" "$@" >"$HOME/words"; }\ncmd="torchrun'
    )
    (tmp_path / "runs" / "trial").mkdir(parents=True)
    subprocess.run(
        ["bash", "-c", shown], cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        timeout=30, capture_output=True,
    )  # fmt: skip
    expected = (tmp_path / "words").read_text().splitlines()
    script = expected.index("../pretrain_gpt.py")
    assert words[words.index("../pretrain_gpt.py") :] == expected[script:]


def test_a_script_is_translated_with_the_files_that_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    words, written = read_launch_script(path, {})
    assert written == {"ds/trial.json": '{"zero_optimization": {"stage": 1}, "train_batch_size": 8}\n'}
    translation = translate_command(words, written=written)
    assert translation.settings["dist"]["sharding_stage"] == "zero1"
    assert translation.settings["model"]["d_model"] == 64
    assert translation.files["train_data.txt"] == "0.3 data/a b\n0.7 data/c\n"
    assert translation.files["deepspeed.json"] == written["ds/trial.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "python train.py --lr $RATE",
            "--lr $RATE: its value is known only when the script runs. Give it with --set",
        ),
        ("if which x; then RATE=1; fi\npython a.py --lr $RATE", "it is assigned under a condition"),
        ('A="--lr $RATE --seed 1"\npython a.py $A', "--lr $RATE: its value is known only"),
        ("source none.sh\npython a.py --lr $RATE", "source none.sh: this file is not there"),
        ("python a.py --lr $(cat rate)", "--lr $(cat rate): its value is known only when the script runs"),
        ("echo --lr 1", "no command that starts a .py file with arguments"),
        ("for i in 1 2; do RATE=$i; done\npython a.py --lr $RATE", "assigned under a condition"),
    ],
)
def test_what_only_a_shell_could_know_is_an_error_with_its_name(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ValueError) as refused:
        read(tmp_path, text)
    assert message in str(refused.value)


def test_values_can_be_given_and_unused_ones_may_be_unknown(tmp_path: Path) -> None:
    text = (
        "RATE=1\npython a.py --lr $RATE --merge-file $(pwd)/$X --tensorboard-dir $(date) --layers ${L[1]} $1"
    )
    assert read(tmp_path, text, RATE="2", L="5 6", **{"1": "last"})[-3:] == ["--layers", "6", "last"]
    assert "2" in read(tmp_path, text, RATE="2", L="5 6", **{"1": "last"})


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    text = (
        f"touch {marker}\nX=$(touch {marker})\nY=`touch {marker}`\neval touch {marker}\npython a.py --lr 1 $X"
    )
    with pytest.raises(ValueError, match="touch"):
        read(tmp_path, text)
    assert not marker.exists()


def test_scripts_that_source_each_other_end(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="scripts within scripts"):
        read(tmp_path, f"source {tmp_path / 'train.sh'}")


@pytest.mark.parametrize(
    ("text", "value"), [("1 + 2*3", 7), ("(7-9)/2", -1), ("-7 % 3", -1), ("2*(3+4)", 14), ("7/2", 3)]
)
def test_arithmetic_is_that_of_bash(text: str, value: int) -> None:
    shown = subprocess.run(["bash", "-c", f"echo $(({text}))"], capture_output=True, text=True, timeout=30)
    assert evaluate_integer(text) == value == int(shown.stdout)


@pytest.mark.parametrize("text", ["x", "1/0", "__import__('os')", "2**9", "1 if 1 else 2", "1" * 600, "1.5"])
def test_other_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="got"):
        evaluate_integer(text)


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("[ -n a ]", True), ("[ -z ]", True), ("[[ a == b ]]", False), ("[ a != b ]", True),
        ("test 3 -gt 2", True), ("[ ! -n ]", True), ("[ 2 -eq 2 ]", True), ("false", False),
        ("which x", None), ("[[ a", None), ("[ a -eq 2 ]", None),
    ],
)  # fmt: skip
def test_conditions_that_follow_from_values_have_a_truth(text: str, truth: bool | None) -> None:
    assert evaluate_test(text.split()) is truth
    assert evaluate_test(["[", "-z", "", "]"]) is True


def test_the_reader_follows_no_more_than_it_must() -> None:
    script = LaunchScript(Path())
    script.read("A=1; B=$A$A export C=\"$B x\"\nD='$A'\nunset A")
    assert script.variables["D"] == ["$A"]
    assert script.expand('"${D}"-${MISSING:-y}') == ["$A-y"]


@pytest.mark.parametrize(
    "text",
    [
        'if [ -n "$E" ] || [ "$A" = a ]; then X=1; else X=2; fi',
        'if [ -n "$E" ] && [ "$A" = a ]; then X=1; else X=2; fi',
        "if [[ $A == b ]]; then X=1; elif [[ $A == a ]] && [[ 3 -gt 2 ]]; then X=3; fi",
        "if [ $A = a ]; then X=1; elif [ $A = a ] || [ $A = a ]; then X=2; else X=3; fi",
        "if [ $A = b ]; then X=1; elif [ $A = c ] || [ $A = a ]; then X=2; else X=3; fi",
        "if [ $A = b ]; then X=1; elif [ $A = c ]; then X=2; elif [ $A = d ]; then X=3; else X=4; fi",
        '[ -z "$E" ] && X=4',
        '[ -n "$E" ] || X=5',
        "B=(); X=10",
        "f() { X=1; }; f; X=12",
        'X=6; [ -n "$E" ] && X=7',
        'X=8 && [ -z "$E" ] && X=9',
        'if [ "$A" = a ]; then if [ -n "$E" ]; then X=1; else X=11; fi; X=$X.0; fi',
    ],
)
def test_lists_and_conditions_have_the_effect_that_they_have_in_bash(tmp_path: Path, text: str) -> None:
    script = f'A=a; E=""; X=0\n{text}\n'
    shown = subprocess.run(
        ["bash", "-c", f"{script}echo $X"], capture_output=True, text=True, timeout=30, cwd=tmp_path
    )
    words = read(tmp_path, f"{script}python a.py --lr $X")
    assert words[-1] == shown.stdout.strip()


def test_a_list_after_an_unknown_command_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="assigned under a condition"):
        read(tmp_path, "which x && RATE=1\npython a.py --lr $RATE")
    assert read(tmp_path, "mkdir -p x && cd x && python a.py --lr 2")[-1] == "2"


def test_a_value_that_grows_without_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a value of more than 1 MB"):
        read(tmp_path, "A=xxxxxxxx\n" + "A=$A$A\n" * 40 + "python a.py --lr $A")


@pytest.mark.parametrize("text", ["cat <<E >\nx\nE", "A=(1)\nB=${A[" + "9" * 5000 + "]}"])
def test_scripts_that_fuzzing_has_made_are_read(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, f"{text}\npython a.py --lr 1\0")[-1] == "1"


def test_brackets_without_an_end_take_the_rest_of_the_script(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no command that starts"):
        read(tmp_path, "A=(1).x=$((8*4)\npython a.py --lr 1")
