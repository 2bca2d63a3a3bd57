#!/usr/bin/env bash
# The measured crossover on a CPU: text, tokens, the runs of each part, forecasts, their scores, the crossing and the page.
#   study_crossover_cpu.sh [PART...]  parts of study_crossover_cpu.yaml, in order (default: all, about five hours)
#   CORPUS  see tools/prepare_corpus.py --help (auto)   OUT  folder of the study   JOBS  concurrent runs (one per core)
# Relative paths start at the checkout, whatever the working directory.
# After an interruption, run the same command again to resume.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${OUT:-experiments/study_crossover_cpu}
study=examples_scaling/training/study_crossover_cpu.yaml
[ $# -gt 0 ] || set -- tune tune2 u8k u16k u33k u65k fresh u131k
python tools/prepare_corpus.py --corpus "${CORPUS:-auto}" --held-out-share 0.2 --out "$out/text"
python tools/train_tokenizer.py "$out/text/train.jsonl" --n-tokens 512 --out "$out/tokenizer"
for split in train held_out; do
    python tools/preprocess_data_many_cores.py --overwrite --input "$out/text/$split.jsonl" --output-prefix "$split" \
        --root "$out/tokens" --dataset-impl mmap --tokenizer-type HFTokenizer --tokenizer-model "$out/tokenizer" \
        --append-eod --workers "$(nproc)"
done
# held_out_train selects the settings, held_out_valid is the test text
python tools/subset_corpus.py --input "$out/tokens/held_out_text_document" --split 1,1,0 --output "$out/tokens/held_out"
for part in "$@"; do
    case $part in u65k) next=65536 ;; u131k) next=131072 ;; *) next= ;; esac
    # a forecast is made once, before the first run on its text
    if [ -n "$next" ] && ! compgen -G "$out/runs/*-${part//[!0-9]/}*kunique-*" >/dev/null; then
        python tools/laws.py crossover "$out" --seal "$next"
    fi
    python tools/sweep.py "$study" --part "$part" "directory=$out" ${JOBS:+--jobs "$JOBS"}
    python tools/collect.py "$out"
    python tools/laws.py crossover "$out"
done
python tools/make_report.py "$out"
