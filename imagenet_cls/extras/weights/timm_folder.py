"""Write a trained timm model as a folder that timm and the Hugging Face Hub read.

Weights, `config.json`, model card.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import timm
from safetensors import SafetensorError
from safetensors.torch import save_file

from imagenet_cls import __version__
from imagenet_cls.checkpoint.format import class_metadata
from imagenet_cls.config.compare import differing_values
from imagenet_cls.config.keys import per_machine_keys
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import CheckpointError, ResourceError, UsageError, explain_content_errors
from imagenet_cls.files import explain_write_errors
from imagenet_cls.inference.predictor import Predictor
from imagenet_cls.models.factory import CROP_MODES
from imagenet_cls.report.jsonl import describe_result
from imagenet_cls.text import first_line, printable

FILES = ("model.safetensors", "config.json", "README.md")
_FOLDER = "local-dir:"  # the beginning of a model's name
# Keys of timm's pretrained_cfg that do not depend on the weights, as tag, license and papers do.
_ARCHITECTURE_KEYS = (
    "architecture",
    "input_size",
    "pool_size",
    "min_input_size",
    "first_conv",
    "classifier",
)
# Sections whose values a model card lists; others name files and machines.
_RECIPE = ("augment", "mix", "loss", "distill", "optimizer", "schedule", "train", "ema")


def write_folder(predictor: Predictor, folder: Path, license_id: str | None) -> None:
    """Write `FILES` by timm's `save_for_hf`.

    predictor: on the CPU. license_id: as the Hub names it, such as `apache-2.0`. Raises UsageError
    for a model or preprocessing that timm does not have, CheckpointError and ResourceError.
    """
    config = predictor.config
    model = predictor.model
    check_timm_model(predictor)
    source: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    model.pretrained_cfg = {key: source[key] for key in _ARCHITECTURE_KEYS if key in source}  # type: ignore[assignment]
    preprocessing = {
        "input_size": (len(predictor.mean), *predictor.transform.crop),
        "mean": predictor.mean,
        "std": predictor.std,
        "interpolation": config.eval.interpolation,
        "crop_pct": timm_crop_pct(predictor),
        "crop_mode": CROP_MODES[config.eval.mode],
    }
    described: dict[str, Any] = {"label_names": list(predictor.classes)}
    described["pretrained_cfg"] = {"license": license_id} if license_id else {}
    if predictor.threshold is not None:
        described["problem_type"] = "multi_label_classification"  # transformers then uses sigmoid
        described["threshold"] = predictor.threshold
    with (
        explain_content_errors(CheckpointError, predictor.path, "timm can't describe its model"),
        explain_write_errors(folder, "Give another folder."),
    ):
        for file in FILES:  # an interrupted --overwrite leaves no card of another model
            (folder / file).unlink(missing_ok=True)
        try:
            timm.models.save_for_hf(
                model,
                str(folder),
                described,
                config.model.kwargs,
                safe_serialization=True,
                data_config=preprocessing,
            )
        except SafetensorError as error:
            raise ResourceError(
                f"Can't write {folder}: {first_line(error)}", "Give another folder."
            ) from error
        # transformers passes num_classes and **model_args to timm, so it must not be in both.
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        stored.get("model_args", {}).pop("num_classes", None)
        (folder / "config.json").write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
        # again, with the classes; safetensors gives its file the mode 0600
        metadata = class_metadata(predictor.classes)
        save_file(model.state_dict(), folder / "model.safetensors", metadata)
        shutil.copymode(folder / "config.json", folder / "model.safetensors")
        card = model_card(predictor, folder.resolve().name, license_id)
        (folder / "README.md").write_text(card, encoding="utf-8")


def check_timm_model(predictor: Predictor) -> None:
    """Raise UsageError where timm alone does not build the model."""
    name = predictor.config.model.name
    if name.startswith(("hf-hub:", _FOLDER)) or ":" not in name:
        settings = getattr(predictor.model, "pretrained_cfg", None) or {}
        architecture = settings.get("architecture", "")
        # a user's module may have registered a model in timm
        if timm.is_model(architecture):
            module = timm.model_entrypoint(architecture).__module__
            if module.startswith("timm."):
                return
    raise UsageError(
        f"{predictor.path}: {name} is not a model of timm, so timm can't load it from a folder.",
        "Use tools/export.py, or the weights in the checkpoint.",
    )


def timm_crop_pct(predictor: Predictor) -> float:
    """The crop_pct with which timm computes the run's resized size, floor(crop / crop_pct).

    Raises UsageError for a rectangular crop after a resize of one side, for which there is none.
    """
    crop = predictor.transform.crop
    resized = predictor.transform.resized
    evaluation = predictor.config.eval
    share = evaluation.crop_pct if evaluation.resize_px is None else crop[0] / resized[0]
    if math.floor(crop[0] / share) < resized[0]:  # the quotient was rounded up
        share = math.nextafter(share, 0)
    if tuple(math.floor(side / share) for side in crop) != resized:
        raise UsageError(
            f"{predictor.path}: timm has no eval.resize_px={evaluation.resize_px} with a crop of "
            f"{crop} pixels.",
            "Train and evaluate with eval.crop_pct and eval.resize_px=null.",
        )
    return share


def model_card(predictor: Predictor, name: str, license_id: str | None) -> str:
    """README.md in the Hub's form, with what config.json lacks. Contains no paths of data or
    weights.
    """
    config = predictor.config
    kind = predictor.weights
    details = {"Weights": predictor.path.name}
    state = predictor.state
    if state:  # of a checkpoint
        progress = state["progress"]
        details["Weights"] = f"{kind} of step {state['step']}"
        if kind in progress["latest"] and progress["evaluated_step"] == progress["step"]:
            metrics = progress["latest"][kind]
            # the last text has the seconds, which a checkpoint lacks
            *texts, _ = describe_result(metrics | {"seconds": 0.0}, 2, len(predictor.classes))
            details["Result on the validation images of the run"] = (
                f"{', '.join(texts)}, {metrics['images']:,} images"
            )
            not_in_timm = ["eval.flip_tta"] if config.eval.flip_tta else []
            if config.data.exif == "apply":
                not_in_timm.append("data.exif")
            if not_in_timm:
                details["Not in timm's transform, but in the result"] = ", ".join(not_in_timm)
    if config.model.checkpoint is not None:
        details["Initial weights"] = f"{Path(config.model.checkpoint).name}; see their license"
    elif config.model.pretrained and not config.model.name.startswith(_FOLDER):
        details["Initial weights"] = f"published for {config.model.name}; see their license"
    local = per_machine_keys() | {"distill.teacher.checkpoint"}
    for key, (_, value) in differing_values([Config(), config]).items():
        is_recipe = key.partition(".")[0] in _RECIPE and key not in local
        if is_recipe and not value.startswith(_FOLDER):
            details[key] = value
    lines = "\n".join(f"- **{key}:** {printable(value)}" for key, value in details.items())
    usage = 'or `transformers.pipeline("image-classification", model="FOLDER")`'
    if config.data.channels == 1:  # that pipeline passes RGB images
        usage = 'The images must be gray: `image.convert("L")`.'
    return f"""---
tags:
- image-classification
- timm
- transformers
pipeline_tag: image-classification
library_name: timm
license: {license_id or "unknown"}
---
# Model card for {name}

An image classifier trained with imagenet-cls {__version__}.

{lines}

```python
import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()  # or hf-hub:USER/NAME
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
```

{usage}
"""
