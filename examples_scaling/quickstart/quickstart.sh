#!/usr/bin/env bash
# From raw text to a compute-optimal frontier, and a check of its prediction.
#   quickstart.sh [CORPUS]      CORPUS: auto, c4, local or a path, see tools/prepare_corpus.py --help
#   OUT    folder of the study (experiments/quickstart)
#   SEED   added to the seed of every run (0); another value gives an independent repetition
# Relative paths start at the checkout, whatever the working directory.
# Every step skips what is finished: run the same command again to resume.
set -euo pipefail
cd "$(dirname "$0")/../.."
study=examples_scaling/quickstart/quickstart.yaml
out=${OUT:-experiments/quickstart}
overrides=("directory=$out" "seed=${SEED:-0}")
size=(--max-mb 14 --min-mb 14)

echo "1/8 text";       python tools/prepare_corpus.py --corpus "${1:-auto}" "${size[@]}" --out "$out/text"
echo "2/8 tokenizer";  python tools/train_tokenizer.py "$out/text/train.jsonl" --n-tokens 2048 --out "$out/tokenizer"
echo "3/8 tokens"
for split in train held_out; do
    python tools/preprocess_data_many_cores.py --overwrite --input "$out/text/$split.jsonl" --output-prefix "$split" \
        --root "$out/tokens" --dataset-impl mmap --tokenizer-type HFTokenizer --tokenizer-model "$out/tokenizer" \
        --append-eod --workers "$(nproc)"
done
echo "4/8 ladder";     python tools/sweep.py "$study" "${overrides[@]}"
echo "5/8 frontier, and the forecast of a run at 4 times the largest budget"
if python tools/laws.py frontier "$out" --predict; then
    echo "6/8 that run";  python tools/sweep.py "$study" "${overrides[@]}"
else
    echo "6/8 no forecast, for the reason above; continuing with the report"
fi
# the run of the forecast; without a forecast the largest of the ladder
model=$(find "$out/runs" -maxdepth 1 -name '*-forecast-*' | head -n 1)
[[ $model ]] || model=$(find "$out/runs" -maxdepth 1 -name "*-d72-*" | head -n 1)
echo "7/8 loss by position in the window, and a sample of text"
python tools/validate.py "$model" --data "$out/tokens/held_out_text_document" --threads "$(nproc)"
python tools/generate_text.py "$model" --prompt "The " --max-new-tokens 100 --threads 1 --out "$model/sample.json"
echo "8/8 table, parametric law ($out/law.txt), report"
python tools/collect.py "$out" --out "$out/table.csv" > "$out/table.txt"
python tools/fit_law.py "$out/table.csv" --form chinchilla --objective autoregressive --out "$out/law.json" > "$out/law.txt"
echo
python tools/make_report.py "$out"
echo "next: in $study add a budget to the cells and move size: best to more FLOPs, then run this command again"
