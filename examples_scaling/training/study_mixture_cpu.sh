#!/usr/bin/env bash
# Which mixture of five domains? Texts, tokens, 20 mixtures at two sizes, the law, its answer, and a blind check of it at
# twice the larger size.
#   study_mixture_cpu.sh     OUT  folder of the study
#   CODE WEB                 see tools/prepare_corpus.py --help (local; C4 in $SCALING_DATA, or c4)
#   DOCS BOOKS WIKI          .jsonl files with a key text; default: Linux documentation of Debian (download), and from
#                            $SCALING_DATA two books of Project Gutenberg and the Wikipedia passages of BoolQ
# Relative paths start at the checkout, whatever the working directory.
# After an interruption, run the same command again to resume.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${OUT:-experiments/study_mixture_cpu}
data=${SCALING_DATA:-../shared/data}
web=c4
[ ! -d "$data/c4" ] || web="$data/c4/*.jsonl"
study=examples_scaling/training/study_mixture_cpu.yaml
mkdir -p "$out/raw"

if [ -z "${DOCS:-}" ] && [ ! -d "$out/raw/linux-doc" ]; then
    (cd "$out/raw" && apt-get download linux-doc-6.1 && dpkg-deb -x linux-doc-6.1_*.deb linux-doc.part && mv linux-doc.part linux-doc)
fi
# documents of at most 8,000 characters, so that two books can be split into training and held-out text
python - "$out/raw" "$data" <<'PYTHON'
import gzip, json, os, sys
from pathlib import Path

raw, data = map(Path, sys.argv[1:])


def read_jsonl(path, key="text"):
    return dict.fromkeys(json.loads(line)[key] for line in path.open(encoding="utf-8"))


texts = {
    "docs": lambda: [gzip.open(path, "rt", errors="ignore").read() for path in sorted(raw.rglob("*.rst.gz"))],
    "books": lambda: read_jsonl(data / "redpajama_sample/sample_book2.jsonl"),
    "wiki": lambda: read_jsonl(data / "downstream/boolq_validation.jsonl", "passage"),
}
for domain, read in texts.items():
    given = os.environ.get(domain.upper())
    with (raw / f"{domain}.jsonl").open("w", encoding="utf-8") as file:
        for text in read_jsonl(Path(given)) if given else read():
            for start in range(0, len(text), 8000):
                file.write(json.dumps({"text": text[start : start + 8000]}) + "\n")
PYTHON

for domain in code docs web books wiki; do
    case $domain in code) corpus=${CODE:-local} ;; web) corpus=${WEB:-$web} ;; *) corpus=$out/raw/$domain.jsonl ;; esac
    python tools/prepare_corpus.py --corpus "$corpus" --max-mb 8 --out "$out/text/$domain"
done
# one vocabulary from the first megabyte of each domain
for domain in code docs web books wiki; do head -c 1000000 "$out/text/$domain/train.jsonl" | sed '$d'; done > "$out/text/all.jsonl"
python tools/train_tokenizer.py "$out/text/all.jsonl" --n-tokens 2048 --out "$out/tokenizer"
for domain in code docs web books wiki; do
    for split in train held_out; do
        python tools/preprocess_data_many_cores.py --overwrite --input "$out/text/$domain/$split.jsonl" \
            --output-prefix "$domain" --root "$out/tokens/$split" --dataset-impl mmap --tokenizer-type HFTokenizer \
            --tokenizer-model "$out/tokenizer" --append-eod --workers "$(nproc)"
    done
done
for domain in code docs web books wiki; do echo "1 $out/tokens/held_out/${domain}_text_document"; done > "$out/tokens/held_out.txt"

python tools/sweep.py "$study" --part grid "directory=$out"
# the answer at twice the larger size, before its runs: rows of domain, weight, epochs, at_bound, and the weights of the
# best trained mixture
answer() {
    python tools/laws.py mix "$out" --natural code=0.366 docs=0.368 web=0.188 books=0.066 wiki=0.012 \
        --size 358560 --tokens 4.0e+6 --plot "$out/mixtures.html"
}
weights() {
    awk -v column="$1" '$4 == "True" || $4 == "False" {printf "%s%s: %s", sep, $1, $column; sep = ", "}' "$out/answer.txt"
}
answer | tee "$out/answer.txt"
python tools/sweep.py "$study" --part check "directory=$out" "mixtures.weights.best={$(weights 2)}" \
    "mixtures.weights.trained={$(weights 5)}"
answer # with the losses of the runs that it predicted
python tools/collect.py "$out"
python tools/make_report.py "$out"
