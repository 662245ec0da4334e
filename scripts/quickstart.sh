#!/usr/bin/env bash
# From a clone to a trained classifier:  bash scripts/quickstart.sh
# Sets up .venv, trains the demo on 1,797 real images of handwritten digits, evaluates it and classifies held-out images.
# May be run again: it replaces its own run, work_dirs/quickstart, and touches nothing else.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$root"
run=work_dirs/quickstart
python=.venv/bin/python

bash scripts/setup.sh

echo
echo "== 1/3  Training configs/demo.yaml: about a minute on a laptop's CPU"
"$python" tools/train.py configs/demo.yaml --work-dir "$run" --overwrite

echo
echo "== 2/3  Evaluating it on the held-out images"
rm -f "$run/predictions.csv"  # from an earlier quickstart; test.py does not overwrite files
"$python" tools/test.py configs/demo.yaml "$run" --out "$run/predictions.csv"

echo
echo "== 3/3  Classifying five of them; an image's folder is its true class"
paths=()
while IFS= read -r name; do paths+=("data/digits/train/$name"); done < <(
    "$python" - "$run/predictions.csv" <<'PYTHON'
import csv, sys

with open(sys.argv[1], newline="") as file:
    names = [row["image"] for row in csv.DictReader(file)]
print("\n".join(names[:: len(names) // 5][:5]))
PYTHON
)
"$python" tools/predict.py "$run" "${paths[@]}"

cat <<TEXT

The run folder is $root/$run:
  checkpoints/  metrics.jsonl  plots/  logs/  config.yaml  predictions.csv
Look at the curves:   .venv/bin/tensorboard --logdir work_dirs
A page of its errors: .venv/bin/python tools/test.py $run --report reports/quickstart.html
A page of the run:    .venv/bin/python tools/report.py $run
Your own photos:      .venv/bin/python tools/train.py photos    # class folders: photos/CLASS/*.jpg
Your own ImageNet:    .venv/bin/python tools/train.py configs/resnet50.yaml data.root=/path/to/imagenet
On several GPUs:      bash scripts/dist_train.sh configs/resnet50.yaml 8 data.root=/path/to/imagenet
TEXT
