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
from imagenet_cls.private_names import generate_readme
from imagenet_cls.report.jsonl import describe_result
from imagenet_cls.text import first_line, join_names, printable

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
        card = model_card(predictor, preprocessing, license_id)
        readme = generate_readme(card, folder.resolve().name)
        (folder / "README.md").write_text(readme, encoding="utf-8")


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


def is_local(data_name: str) -> bool:
    """Whether a `data.name` has the path of a folder."""
    location = data_name.removeprefix("hf:")
    return location != data_name and (
        location.startswith(("/", "~", ".")) or Path(location).is_dir()
    )


def model_card(
    predictor: Predictor, preprocessing: dict[str, Any], license_id: str | None
) -> dict[str, Any]:
    """The argument of timm's `generate_readme`. Contains no paths of data or weights."""
    config = predictor.config
    kind = predictor.weights
    state = predictor.state
    details: dict[str, Any] = {
        "Architecture": predictor.model.pretrained_cfg["architecture"],  # type: ignore[index]
        "Weights": predictor.path.name,
        "Preprocessing": {key: str(value) for key, value in preprocessing.items()},
    }
    names = predictor.classes
    details["Classes"] = f"{len(names):,}: {join_names(names, 20)}"
    details["Mean and std"] = "of the initial weights, or of the architecture in timm"
    if config.data.mean is not None:
        details["Mean and std"] = "given in the config of the training"
    progress: dict[str, Any] = {"latest": {}}
    if state:  # of a checkpoint
        progress = state["progress"]
        details["Data"] = "a local folder" if is_local(config.data.name) else config.data.name
        details["Weights"] = f"{kind} of step {state['step']}"
    if predictor.threshold is not None:
        details["Outputs"] = (
            "logits for a sigmoid; an image has each class whose probability is at least "
            f"{predictor.threshold:g}, or none"
        )
    if kind in progress["latest"] and progress["evaluated_step"] == progress["step"]:
        metrics = progress["latest"][kind]
        # the last text has the seconds, which a checkpoint lacks
        *texts, _ = describe_result(metrics | {"seconds": 0.0}, 2, len(predictor.classes))
        details["Result on the validation images of the run"] = ", ".join(
            [*texts, f"{metrics['images']:,} images"]
        )
        not_in_timm = []
        if config.eval.flip_tta:
            not_in_timm.append("eval.flip_tta")
        if config.data.exif == "apply":
            not_in_timm.append("data.exif")
        if not_in_timm:
            details["Not in timm's transform, but in the result"] = ", ".join(not_in_timm)
    if config.model.checkpoint is not None:
        details["Initial weights"] = f"{Path(config.model.checkpoint).name}; see their license"
    elif config.model.pretrained and not config.model.name.startswith(_FOLDER):
        details["Initial weights"] = f"published for {config.model.name}; see their license"
    local = per_machine_keys() | {"distill.teacher.checkpoint"}
    settings = {}
    for key, (_, value) in differing_values([Config(), config]).items():
        is_recipe = key.partition(".")[0] in _RECIPE and key not in local
        if is_recipe and not value.startswith(_FOLDER):
            settings[key] = printable(value)
    details["Settings that differ from the defaults"] = settings
    usage = (
        "```python\nimport timm\n\n"
        'model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()  # or '
        "hf-hub:USER/NAME\n"
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n"
        "```\n\n"
    )
    if config.data.channels == 1:  # the pipeline of transformers passes RGB images
        usage += 'The images must be gray: `image.convert("L")`.'
    else:
        usage += 'or `transformers.pipeline("image-classification", model="FOLDER")`'
    return {
        "license": license_id or "unknown",
        "description": f"An image classifier trained with imagenet-cls {__version__}.",
        "details": {
            key: value if isinstance(value, dict) else printable(str(value))
            for key, value in details.items()
        },
        "usage": usage,
    }
