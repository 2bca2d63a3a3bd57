#!/usr/bin/env bash
# From raw text to a fitted scaling law.   quickstart.sh [CORPUS]   (CORPUS: auto, c4, stdlib or a path; see README)
# Relative paths are seen from the checkout, from wherever this is started.
# Every step skips what it finds done, so that running this again goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."
corpus=${1:-auto}
study=examples_scaling/quickstart/quickstart.yaml
out=${OUT:-experiments/quickstart}
overrides=("directory=$out")

# bfloat16 products where the machine has them: elsewhere they are slower than float32
if grep -qsE 'avx512_bf16|amx_bf16' /proc/cpuinfo || command -v nvidia-smi >/dev/null; then
    overrides+=(run.dist.dtype=bfloat16)
fi

echo "1/6 text";      python tools/prepare_corpus.py --corpus "$corpus" --out "$out/text"
echo "2/6 tokenizer"; python tools/train_tokenizer.py "$out/text/train.jsonl" --n-tokens 4096 --out "$out/tokenizer"
echo "3/6 tokens"
for split in train held_out; do
    python tools/preprocess_data_many_cores.py --overwrite --input "$out/text/$split.jsonl" --output-prefix "$split" \
        --root "$out/tokens" --dataset-impl mmap --tokenizer-type HFTokenizer --tokenizer-model "$out/tokenizer" \
        --append-eod --workers "$(nproc)"
done
echo "4/6 training";  python tools/sweep.py "$study" "${overrides[@]}"
echo "5/6 law"
python tools/collect.py "$out" --out "$out/table.csv"
python tools/fit_law.py "$out/table.csv" --form chinchilla --objective autoregressive --out "$out/law.json"
echo "6/6 report";    python tools/make_report.py "$out"
