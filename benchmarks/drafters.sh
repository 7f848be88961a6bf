#!/usr/bin/env bash
# Train the drafters of docs/results/drafters.md on equal tokens, at equal size (2.3 M parameters for the bundled target), and compare
# them. Called again, it goes on where it was.
#
#   benchmarks/drafters.sh DATA [OUT]   DATA holds {train,valid,test}.jsonl.gz of chats; OUT is runs/drafters unless given
#   STEPS=600  CONVERSATIONS=6000       optimiser steps of 4,096 tokens; conversations that the target writes anew
#   JOBS=2 ONLY="moa eagle2"            trainings side by side, one CPU core each; some of the drafters
#   DEVICE=cuda                         train on a GPU, in steps of 32,768 tokens
#   RATE="--optimizer adamw --lr 3e-3"  optimiser and peak learning rate of all of them; Muon's 4e-3 unless given
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
DATA=${1:?which folder has train.jsonl.gz, valid.jsonl.gz and test.jsonl.gz?}
OUT=${2:-runs/drafters}
MOASERVE=${MOASERVE:-.venv/bin/moaserve}
MACHINE="--device cpu --threads 1 --compile --batch-tokens 2048"
[[ ${DEVICE:-cpu} == cpu ]] || MACHINE="--device $DEVICE --batch-tokens 16384"
TARGET=models/pretrained/concierge
STEPS=${STEPS:-600}

MOA="--method moa --sa-kv-heads 2 --ca-kv-heads 2 --min-interval 4 --max-interval 10 --feature-weight 0.1 --draws 2"
PAIRED="--method moa --sa-kv-heads 2 --ca-kv-heads 2 --min-interval 4 --max-interval 10 --feature-weight 0 --staircase-until 0 --draws 5 --paired"
LSA="--lsa-kv-heads 2 --lsa-mlp 384"
WIDTH="--sa-mlp 736 --ca-mlp 736"
declare -A OPTIONS=(
  [moa]="$MOA $LSA $WIDTH"
  [moa-copying]="$PAIRED --lsa-kv-heads 2 --lsa-mlp 32 --sa-mlp 96 --ca-mlp 416 --draft-block 9"
  [moa-copying-without-lsa]="$PAIRED --without-lsa --sa-mlp 96 --ca-mlp 544 --draft-block 9"
  [moa-copying-without-ca]="$PAIRED --without-ca --lsa-kv-heads 2 --lsa-mlp 32 --sa-mlp 96 --ca-mlp 416 --draft-block 9"
  [moa-paired]="$PAIRED --lsa-kv-heads 2 --lsa-mlp 16 --sa-mlp 96 --ca-mlp 1232"
  [moa-paired-n1]="$PAIRED --lsa-kv-heads 2 --lsa-mlp 32 --sa-mlp 96 --ca-mlp 1216 --layers-inferred 1"
  [moa-block]="$MOA $LSA --sa-mlp 416 --ca-mlp 416 --draft-block 9"
  [moa-n1]="$MOA $LSA $WIDTH --layers-inferred 1"
  [moa-without-lsa]="$MOA --sa-mlp 928 --ca-mlp 928 --without-lsa"
  [moa-without-ca]="$MOA $LSA $WIDTH --without-ca"
  [moa-paper]="$MOA $LSA --sa-mlp 832 --ca-mlp 832 --without-entry --draws 1"
  [eagle2]="--method eagle2 --draft-mlp 2176 --feature-weight 1 --kl-weight 0.1"
  [eagle3]="--method eagle3 --draft-mlp 1888"
  [independent]="--method independent --draft-hidden 192 --draft-layers 3 --draft-mlp 192"
)
# The slowest first, so that none runs alone at the end.
ONLY=${ONLY:-moa-paired-n1 eagle3 moa-copying moa-copying-without-ca moa-copying-without-lsa independent eagle2 moa-paper}

train() {
  local resume=()
  [[ -d $OUT/$1/checkpoints ]] && resume=(--resume)
  # shellcheck disable=SC2086
  $MOASERVE train --target $TARGET --data "$DATA/train.jsonl.gz" --valid "$DATA/valid.jsonl.gz" --out "$OUT/$1" $MACHINE \
    --regenerate "${CONVERSATIONS:-6000}" --max-length 1024 --accumulate 2 --kl-weight 1 ${RATE:---optimizer muon --lr 4e-3} \
    --schedule cosine --warmup 100 --max-steps "$STEPS" --valid-every 250 --valid-tokens 40000 $2 "${resume[@]}" 2>"$OUT/$1.log"
}

mkdir -p "$OUT"
for name in $ONLY; do
  while (($(jobs -rp | wc -l) >= ${JOBS:-2})); do wait -n; done
  echo "$name: $OUT/$name.log"
  train "$name" "${OPTIONS[$name]}" &
done
wait

drafters=()
for name in $ONLY; do drafters+=(--drafter "$name=$OUT/$name"); done
$MOASERVE eval "${drafters[@]}" --drafter ngram --prompts "$DATA/test.jsonl.gz" --num-prompts 64 --compile off --draft-window 0 --out "$OUT/default-tree"
$MOASERVE eval "${drafters[@]}" --drafter ngram --prompts "$DATA/test.jsonl.gz" --num-prompts 64 --compile off --draft-window 0 \
  --draft-depth 6 --draft-breadth 8 --draft-nodes 62 --draft-min-reach 0 --out "$OUT/paper-tree"
