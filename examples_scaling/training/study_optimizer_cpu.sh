#!/usr/bin/env bash
# Optimizers compared on a CPU: text, tokens, the tuning of each, four sizes of the best, the gains and the page.
#   study_optimizer_cpu.sh [PART...]  parts of study_optimizer_cpu.yaml (default: tune ladder, less than two hours)
#   CORPUS  see tools/prepare_corpus.py --help (local)   OUT  folder of the study   JOBS  concurrent runs (one per core)
# Relative paths start at the checkout, whatever the working directory.
# After an interruption, run the same command again to resume.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${OUT:-experiments/study_optimizer_cpu}
study=examples_scaling/training/study_optimizer_cpu.yaml
[ $# -gt 0 ] || set -- tune ladder
python tools/prepare_corpus.py --corpus "${CORPUS:-local}" --max-mb 14 --min-mb 14 --out "$out/text"
python tools/train_tokenizer.py "$out/text/train.jsonl" --n-tokens 512 --out "$out/tokenizer"
for split in train held_out; do
    python tools/preprocess_data_many_cores.py --overwrite --input "$out/text/$split.jsonl" --output-prefix "$split" \
        --root "$out/tokens" --dataset-impl mmap --tokenizer-type HFTokenizer --tokenizer-model "$out/tokenizer" \
        --append-eod --workers "$(nproc)"
done
for part in "$@"; do
    python tools/sweep.py "$study" --part "$part" "directory=$out" ${JOBS:+--jobs "$JOBS"}
done
python tools/collect.py "$out"
if compgen -G "$out/runs/*-seed?-muon-*/result.json" >/dev/null; then
    python tools/laws.py gain "$out" '*-seed?-adamw-*' '*-seed?-muon-*' --plot "$out/gain_muon.html"
    python tools/laws.py gain "$out" '*-seed?-adamw-*' '*-seed?-adamw-*:loss_ema'
fi
python tools/make_report.py "$out"
