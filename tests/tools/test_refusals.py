"""Wrong input of every command without a GPU or a run: a status, one sentence, and no file."""

import json
import shlex
from pathlib import Path

import pandas as pd
import pytest

from megatron.laws.law import Law
from tests.tools.conftest import TRUTH, simulate_runs

PLAN = "plan --budget 1e10"
FIT = "fit {}/runs.csv --out {}/law.json --n-bootstrap 0"
FIT_AR = f"{FIT} --objective autoregressive"
COLLECT = "collect {}/a.log --from megatron --out {}/t.csv"
SUBSET = "subset --input {}/in.jsonl --output {}/out.jsonl"
CONVERT = "convert run {}/out"
ROWS = [  # command, with {} for the folder of inputs; exit status; a part of the error
    ("collect {}/a.log --set n_params=1", 2, "--set, --facts and --map require --from"),
    ("collect {}/a.log --from megatron", 2, "--from requires --out TABLE.csv"),
    (f"{COLLECT} --set n_params", 1, "--set: got n_params, expected NAME=VALUE"),
    (f"{COLLECT} --set n_params=many", 1, "n_params: got 'many', expected a number"),
    (FIT, 1, "got runs of autoregressive, masked_diffusion, expected one objective. Choose it with"),
    (f"{FIT} --objective autoregresive", 1, "did you mean 'autoregressive'?"),
    (f"{FIT} --objective masked_diffusion", 1, "got 3 distinct (N, D) for 5 constants"),
    (f"{FIT_AR} --n-column n_param", 1, "did you mean 'n_params'?"),
    (f"{FIT_AR} --loss-column run", 1, "row 1, run: got 'r0', expected a positive number"),
    (f"{FIT_AR} --form repeated_data --unique-column unique", 1, "no column 'unique'"),
    (f"{FIT_AR} --hold-out 18", 1, "got 18 of 18"),
    (f"{FIT_AR} --approach 2 --flops-by flops", 1, "no column 'flops'"),
    (f"{FIT_AR} --compare chinchilla,moon --hold-out 5", 1, "form: got 'moon', expected one of"),
    (f"{FIT_AR} --group model", 1, "no column 'model'"),
    (f"{FIT_AR} --where 'epochs = 1'", 1, "Expected an expression of pandas"),
    (f"{FIT_AR} --where 'data == 1'", 1, "'data' is not defined"),
    (f"{FIT_AR} --where 'epochs == 9'", 1, "no finished run is left"),
    (f"{FIT_AR} --fix alpha=beta", 2, "--fix: got alpha=beta, expected NAME=VALUE, for example alpha=0.34"),
    (f"{FIT_AR} --form kaplan", 1, "is of published laws only"),
    (f"{FIT_AR} --form bounded", 1, "Pass its formula as a function"),
    (f"{FIT_AR} --prior alpha=0.3+-0.1", 2, "Use --fix NAME=VALUE"),
    (f"{FIT_AR} --approach 1", 2, "choose from"),
    ("fit {}/none.csv --out {}/law.json", 1, "none.csv"),
    ("fit {}/cut.csv.gz --out {}/law.json", 1, "not a CSV or parquet table"),
    ("fit {}/params.csv --out {}/law.json", 1, "did you mean 'params'? Name another with --n-column."),
    ("fit {}/billions.csv --out {}/law.json", 1, "got 100 at most, expected tokens"),
    ("fit {}/all_held_out.csv --out {}/law.json", 1, "got all runs marked as held out"),
    ("frontier {}/plain.csv --where 'epochs == 9'", 1, "no finished run is left"),
    ("frontier {}/plain.csv --predict", 1, "expected a study's directory"),
    ("frontier {}/plain.csv --flops-by FLOPs", 1, "no column 'FLOPs'"),
    ("downstream {}/plain.csv --score-column los", 1, "did you mean 'loss'?"),
    ("downstream {}/scores.csv --score-column acc", 1, "got hellaswag, piqa, expected one task"),
    ("downstream {}/scores.csv --score-column acc --where 'task == \"x\"'", 1, "no finished run is left"),
    ("downstream {}/plain.csv --score-column loss --chance half", 1, "got 'half'"),
    ("downstream {}/scores.csv --score-column acc --predict 1 2", 2, "--law"),
    ("crossover {}/weak.json {}/none.json", 1, "none.json"),
    ("crossover {}/weak.json {}/weak.json --unique 1e8 -1", 2, "expected a number above 0"),
    ("predict chinchilla 1e9 2e10 --plot a.svg", 2, "got 'a.svg', expected a name that ends in .html"),
    ("sweep study.yaml --plot a.html", 2, "--plot requires --dry-run"),
    ("predict --list --plot a.html", 2, "omit them with --list"),
    ("power-law {}/optima.csv --y-column N_op", 1, "no column 'N_op'; did you mean 'N_opt'?"),
    ("power-law {}/optima.csv --sigma-column se", 1, "no column 'se'"),
    ("power-law {}/optima.csv --predict -1", 2, "got '-1', expected a number above 0"),
    ("power-law {}/cell_0.csv", 1, "row 2, N_opt: got 'nan'"),
    ("power-law {}/cell_1.csv", 1, "row 2, N_opt: got no number"),
    ("power-law {}/cell_2.csv", 1, "row 2, N_opt: got '-3.0'"),
    ("power-law {}/cell_3.csv", 1, "row 2, N_opt: got 'many'"),
    ("plan --budget 1e18 --law none.json", 1, "none.json: got no such file, expected a law"),
    ("plan --budget 1e18 --runs 8 --law {}/weak.json", 1, "do not identify alpha"),
    ("plan --budget 0", 2, "--budget: got '0', expected a number above 0"),
    (f"{PLAN} --sizes 1e9 2e9", 2, "--sizes: removed. Choose from candidates"),
    ("plan", 2, "required: --budget"),
    ("predict nothing.json 1 2", 1, "got neither a file nor the name"),
    ("predict chinchilla -1 2", 1, "N: got -1.0"),
    ("predict chinchilla 1e9", 2, "expected both"),
    ("predict chinchilla", 2, "no N and D and no --flops"),
    ("predict", 2, "got no LAW"),
    ("predict chinchilla 1e9 1e10 --unique 1e9", 1, "no term for repetition"),
    ("predict chinchilla --flops 0", 1, "C: got 0.0"),
    ("predict step-law --flops 1e20", 1, "It is not a law of loss"),
    ("predict chinchilla 1e9 1e10 --level 95", 2, "Use Law.predict(N, D, level=SHARE)"),
    ("sizes 117", 1, "'117' is not in model_sizes.yaml; did you mean '117M'?"),
    ("sizes 7M model.n_kv_heads=3", 1, "7M: model.n_kv_heads: got 3, expected a divisor of model.n_heads 4"),
    ("sizes 7M optim.lr=1", 1, "got 'optim.lr=1', expected an option of the model"),
    (f"{SUBSET} --documents -1", 2, "got '-1', expected a whole number of 1 or more"),
    (f"{SUBSET} --sample x", 2, "got 'x', expected a number"),
    (f"{SUBSET} --sample 1 --documents 1", 2, "not allowed with"),
    (SUBSET, 2, "one of the arguments"),
    ("report {}/nothing", 1, "nothing"),
    ("megatron --script {}/a.log", 2, "add --execute"),
    ("generate {}/none --prompt a", 1, "no such checkpoint"),
    ("generate run --device moon", 2, "moon"),
    ("convert {}/a.log {}/out --to native", 1, "a.log: got a file, expected a checkpoint's folder. Convert"),
    (f"{CONVERT} --to full --dtype bfloat16", 1, "are for --to huggingface, not full"),
    (f"{CONVERT} --to sharded --tokenizer gpt2", 1, "--to sharded keeps the run's settings"),
    (f"{CONVERT} --to llama2c", 2, "llama2c"),
    (CONVERT, 2, "required: --to"),
    ("train run.yaml --local_rank=x", 2, "arguments: --local_rank=x"),
    ("sweep study.yaml --local_rank=1", 2, "--local_rank=1"),
    ("sweep study.yaml --retries=-1", 2, "argument --retries: got"),
    ("sweep study.yaml --jobs=0", 2, "argument --jobs: got"),
    ("ranks 0 x.py", 2, "N: got '0', expected a whole number of 1 or more"),
    ("bench/coordinate_check.py --widths 64", 1, "expected two or more"),
    ("serve", 2, "give either a folder to serve, or --status"),
    ("serve {}/m.yaml", 2, "m.yaml is a mixture: serve its folder"),
    ("serve x --follow", 2, "--follow: removed. A mixture has one server"),
    ("serve x --tls-cert c.pem", 2, "--tls-cert and --tls-key go together"),
    ("serve x --prometheus", 2, "--prometheus: removed. Read the counts of"),
    ("serve x --metrics-port 9108", 2, "--metrics-port: removed. Read the counts of"),
    ("merge_datasets.py a b --outptu c", 2, "is required; --outptu: did you mean --output? (see"),
    ("merge_datasets.py a --output c --zzz", 2, "unrecognized arguments: --zzz (see"),
    ("register c add n p --presett c4", 2, "--presett c4; --presett: did you mean --preset? (see"),
    ("validate.py run --data x --max-smaples=3", 2, "--max-smaples: did you mean --max-samples? (see"),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    runs = simulate_runs(6, 3).assign(objective="autoregressive", epochs=1)
    runs.insert(0, "run", [f"r{i}" for i in range(len(runs))])
    other = runs[:3].assign(objective="masked_diffusion")
    pd.concat([runs, other]).to_csv(folder / "runs.csv", index=False)
    pd.concat([runs, other]).to_csv(folder / "cut.csv.gz", index=False)
    (folder / "cut.csv.gz").write_bytes((folder / "cut.csv.gz").read_bytes()[:200])
    runs.to_csv(folder / "plain.csv", index=False)
    runs.rename(columns={"n_params": "params"}).to_csv(folder / "params.csv", index=False)
    runs.assign(train_tokens=runs.train_tokens / 1e9).to_csv(folder / "billions.csv", index=False)
    runs.assign(held_out=1).to_csv(folder / "all_held_out.csv", index=False)
    runs.assign(acc=0.5, task=["piqa", "hellaswag"] * 9).to_csv(folder / "scores.csv", index=False)
    pd.DataFrame({"C": [1e18, 1e20], "N_opt": [1e8, 1e9]}).to_csv(folder / "optima.csv", index=False)
    for i, cell in enumerate(("nan", "", "-3", "many")):
        (folder / f"cell_{i}.csv").write_text(f"C,N_opt\n1e18,1e8\n1e20,{cell}\n")
    Law(
        form="chinchilla", params=TRUTH, objective=0.0, huber_delta=1e-3, n_runs=9, identified=False,
        not_identified={"alpha": "alpha ranges from 0.02 to 2 in the bootstrap"},
    ).save(folder / "weak.json")  # fmt: skip
    (folder / "m.yaml").write_text("catalog: c\n")
    (folder / "a.log").write_text("nothing\n")
    (folder / "in.jsonl").write_text(json.dumps({"text": "x"}) + "\n")
    return folder


@pytest.mark.parametrize(("command", "status", "sentence"), ROWS, ids=[row[0] for row in ROWS])
def test_wrong_input_is_a_sentence(cli, inputs: Path, command: str, status: int, sentence: str) -> None:
    before = sorted(inputs.iterdir())
    done = cli(*shlex.split(command.replace("{}", str(inputs))), status=status)
    assert sentence in done.error
    assert (done.output, done.error.count("\n")) == ("", 1)
    assert sorted(inputs.iterdir()) == before
