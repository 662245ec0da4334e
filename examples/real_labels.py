"""The accuracy of predictions on ReaL labels, several for each of ImageNet's validation images.

    python tools/test.py CONFIG CHECKPOINT --out predictions.jsonl
    python examples/real_labels.py predictions.jsonl real.json

real.json of google-research/reassessed-imagenet: a list of the outputs that are right for image 1,
2, ... of the validation set; images without labels are not counted. The predictions name the
classes by their WordNet ids. Beyer et al., "Are we done with ImageNet?", 2020, arXiv:2006.07159.
"""

import json
import re
import sys
from pathlib import Path

from timm.data import ImageNetInfo

predictions, labels = map(Path, sys.argv[1:])
output_of = {wordnet_id: k for k, wordnet_id in enumerate(ImageNetInfo().label_names())}
right = json.loads(labels.read_text())
hits = []
for line in predictions.read_text().splitlines():
    row = json.loads(line)
    number = re.search(r"ILSVRC2012_val_(\d{8})", row["image"])
    if number is None:
        sys.exit(f"{row['image']}: not the name of a validation image of ImageNet.")
    if outputs := right[int(number[1]) - 1]:
        best, _ = row["top"][0]
        hits.append(output_of[best] in outputs)
print(f"ReaL {100 * sum(hits) / len(hits):.3f} % of {len(hits)}")
