"""Using trained weights: evaluation of any weights on a config's data, and prediction with a checkpoint folder alone.

Refuses to call what a checkpoint's own config names, unless it is a library's model or the user named it, too
(`models.trust`). Called by `cli` for `tools/test.py` and `tools/predict.py`. Writes nothing.
"""

import glob
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imagenet_cls.checkpoint.format import Snapshot, config_of
from imagenet_cls.checkpoint.select import load_best
from imagenet_cls.config.schema import Config, ModelConfig
from imagenet_cls.data import ImageSource, Preprocess, decode_rgb, eval_transform, open_datasets
from imagenet_cls.data.layout import is_image
from imagenet_cls.engine.build import choose_num_classes, rank_devices
from imagenet_cls.engine.differences import differences
from imagenet_cls.engine.evaluate import EvaluationParts, Outputs, compute_logits, evaluate, model_outputs
from imagenet_cls.engine.loaders import build_val_batches
from imagenet_cls.engine.model import choose_mean_std, memory_format, weights_and_origin
from imagenet_cls.engine.step import choose_precision
from imagenet_cls.errors import CheckpointError, ConfigError, DataError, UsageError
from imagenet_cls.lookup import import_from_here
from imagenet_cls.models.build import build_model, first_line
from imagenet_cls.models.resize import resize_model, size_remedy
from imagenet_cls.models.trust import check_trusted
from imagenet_cls.models.weights import load_weights, naming_the_key, state_dict_mismatch, without_split_bn
from imagenet_cls.parallel.collectives import broadcast_tensors, gather_to_main
from imagenet_cls.parallel.data_parallel import spread
from imagenet_cls.parallel.process_group import Group, run_on_main

_BATCH = 32


@dataclass(frozen=True)
class Weights:
    """Models to evaluate by kind (`raw`, `ema`), and how they were built. classes: their names, where they are known.

    origin: a sentence about where they come from; damage: a line for each checkpoint that was passed over; notes: what
    is evaluated otherwise than by the run that made them.
    """

    models: dict[str, nn.Module]
    config: ModelConfig
    imports: list[str]
    num_classes: int
    classes: tuple[str, ...] | None
    mean: list[float]
    std: list[float]
    origin: str
    damage: list[str]
    notes: list[str] = field(default_factory=list)


def evaluate_weights(
    config: Config, checkpoint: Path | None, group: Group, keep_predictions: bool, allow_import: Collection[str] = ()
) -> tuple[str, dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Evaluate weights on the config's validation images; every image exactly once. A collective.

    checkpoint: a checkpoint or run folder of ours, foreign weights, or None for the published weights that the config
    names. allow_import: what a checkpoint may import beyond what the config names. Returns a sentence about the
    weights, with a line for each key that is evaluated otherwise than by the run that made them; the results by kind;
    and on rank 0 (where asked for) one row for each image: image, target, top-5 classes and probabilities, of the EMA
    weights where there are some, else of the raw ones.
    """
    data = open_datasets(config.data, ("val",))
    assert data.val is not None
    weights = load_on_all_ranks(config, checkpoint, len(data.classes), group, allow_import)
    if weights.classes is not None and weights.classes != data.classes:
        raise DataError(
            f"the validation images have {len(data.classes)} classes ({_first(data.classes)}), the checkpoint was "
            f"trained on {len(weights.classes)} ({_first(weights.classes)}).\n"
            "Use the config and the data that it was trained with."
        )
    devices = rank_devices(config, group)
    parts = EvaluationParts(
        batches=partial(build_val_batches, config, data.val, group, len(devices.all)),
        on_devices=partial(spread, devices=devices),
        num_images=len(data.val),
        preprocess=Preprocess(weights.mean, weights.std, group.device, config.train.channels_last),
        autocast_dtype=choose_precision(config.train.precision, group.device),
        mean=weights.mean,
        std=weights.std,
    )
    notes = [fit_to_size(model, weights.config.name, config.eval.crop_px) for model in weights.models.values()]
    for model in weights.models.values():
        model.to(group.device, memory_format=memory_format(config.train))  # type: ignore[call-overload]
    models = {kind: parts.on_devices(model) for kind, model in weights.models.items()}
    outputs = model_outputs(
        models, parts.batches(), parts.preprocess, group.device, parts.autocast_dtype, flip=config.eval.flip_tta
    )
    rows: list[dict[str, Any]] = []
    if keep_predictions:
        outputs = _noting(outputs, list(weights.models)[-1], data.val, data.classes, rows)
    results = evaluate(outputs, list(weights.models), group)
    gathered = gather_to_main(rows, group)
    origin = "\n".join([*weights.damage, ", ".join(filter(None, [weights.origin, notes[0]])), *weights.notes])
    return origin, results, sorted(gathered, key=lambda row: row["index"])


def fit_to_size(model: nn.Module, name: str, size_px: int) -> str | None:
    """Let a model take images of `size_px`; a note where it had to be resized. Raises ConfigError where it can't be."""
    try:
        return resize_model(model, size_px)
    except ValueError as error:
        text = f"{name} can't take {size_px} px: {error}{size_remedy(model, size_px)}"
        raise ConfigError([f"eval.crop_px: {text}"]) from error


def load_on_all_ranks(
    config: Config, checkpoint: Path | None, num_classes: int, group: Group, allow_import: Collection[str] = ()
) -> Weights:
    """Rank 0 reads the weights and hands them to the others, which need no file and no network. A collective."""
    own: list[Weights] = []

    def read() -> tuple[Weights, list[str]]:
        own.append(load_any_weights(config, checkpoint, num_classes, allow_import))
        return replace(own[0], models={}), list(own[0].models)

    told, kinds = run_on_main(group, read)
    models = own[0].models if own else {kind: _build(told.config, told.imports, told.num_classes) for kind in kinds}
    for model in models.values():
        model.load_state_dict(broadcast_tensors(model.state_dict() if own else None, group))
    return replace(told, models=models)


def load_any_weights(
    config: Config, checkpoint: Path | None, num_classes: int, allow_import: Collection[str] = ()
) -> Weights:
    """Raises CheckpointError where the weights do not fit the model, UsageError where there are none.

    The config is the user's, so a checkpoint may call what it names, and what allow_import adds.
    """
    if checkpoint is not None and checkpoint.is_dir():
        snapshot, _, damage = load_best(checkpoint)
        assert snapshot.path is not None
        stored = config_of(snapshot.state, snapshot.path)
        trusted = {config.model.name, *config.imports, *allow_import}
        averaged = len(snapshot.state.get("averaged", []))
        note = f", an average of {averaged} checkpoints" if averaged else ""
        return Weights(
            models=_models_of(snapshot, stored, trusted),
            config=replace(stored.model, pretrained=False, checkpoint=None),
            imports=stored.imports,
            num_classes=snapshot.state["num_classes"],
            classes=tuple(snapshot.state["classes"]),
            mean=snapshot.state["preprocessing"]["mean"],
            std=snapshot.state["preprocessing"]["std"],
            origin=f"{snapshot.path}, step {snapshot.state['step']}{note}",
            damage=damage,
            notes=differences(config, stored, snapshot.state["preprocessing"], snapshot.path),
        )
    if checkpoint is None and not config.model.pretrained and config.model.checkpoint is None:
        raise UsageError(
            "there are no weights to evaluate.\n"
            "Name a checkpoint (test.py CONFIG CHECKPOINT), or set model.pretrained=true for the published ones."
        )
    path = checkpoint or (Path(config.model.checkpoint) if config.model.checkpoint else None)
    count = choose_num_classes(config.model.num_classes, num_classes)
    model = build_model(replace(config.model, pretrained=path is None), count)
    origin, damage = f"published weights of {config.model.name}", []
    if path is not None:
        # A head that is drawn anew is a start for training, but what it names is chance.
        with nullcontext() if checkpoint is not None else naming_the_key("model.checkpoint"):
            weights, origin, damage = weights_and_origin(path)
            origin += f": {load_weights(model, weights, count, head_may_differ=False)}"
    mean, std = choose_mean_std(config, model)
    bare = replace(config.model, pretrained=False, checkpoint=None)
    return Weights({"raw": model}, bare, config.imports, count, None, mean, std, origin, damage)


def _models_of(snapshot: Snapshot, config: Config, trusted: Collection[str]) -> dict[str, nn.Module]:
    """The models of a checkpoint, on the CPU: raw, and averaged where it holds an average. Raises CheckpointError.

    config: the checkpoint's own. trusted: what it may call besides the libraries' models.
    """
    check_trusted(config.model, config.imports, trusted, str(snapshot.path))
    models = {}
    for kind, tensors in (("raw", snapshot.model), ("ema", snapshot.ema)):
        if tensors is None:
            continue
        try:
            models[kind] = _build(config.model, config.imports, snapshot.state["num_classes"])
        except (LookupError, ImportError, RuntimeError, TypeError) as error:
            raise CheckpointError(
                f"{snapshot.path}: its model {config.model.name} can't be built here: {first_line(error)}\n"
                "Start from the folder that has its module, with the library versions named in its state.json."
            ) from error
        kept = without_split_bn(tensors)
        if lacks := state_dict_mismatch(models[kind].state_dict(), kept):
            raise CheckpointError(
                f"{snapshot.path}: does not fit {config.model.name} as this version of its library builds it: {lacks}\n"
                "Install the versions named in its state.json."
            )
        models[kind].load_state_dict(kept)
    return models


def _build(model: ModelConfig, imports: Sequence[str], num_classes: int) -> nn.Module:
    """A model without its weights, in evaluation mode."""
    for name in imports:
        import_from_here(name)
    return build_model(replace(model, pretrained=False, checkpoint=None), num_classes).eval()


def _noting(
    outputs: Iterable[Outputs], kind: str, source: ImageSource, classes: Sequence[str], rows: list[dict[str, Any]]
) -> Iterator[Outputs]:
    """Pass evaluation outputs through and note a row for each image, of one model."""
    for logits, targets, indices in outputs:
        ranked = rank(logits[kind], classes)
        for index, target, ranking in zip(indices.tolist(), targets.tolist(), ranked, strict=True):
            rows.append({"index": index, "image": source.name(index), "target": classes[target], "top": ranking})
        yield logits, targets, indices


def rank(logits: Tensor, classes: Sequence[str], count: int = 5) -> list[list[tuple[str, float]]]:
    """For each row of logits (B, C) the `count` likeliest classes with their probabilities, likeliest first."""
    best = logits.softmax(dim=1).topk(min(count, logits.shape[1]), dim=1)
    return [
        [(name_of(index, classes), probability) for index, probability in zip(indices, probabilities, strict=True)]
        for indices, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def name_of(index: int, classes: Sequence[str]) -> str:
    """A class's name; a head may be wider than the list of classes."""
    return classes[index] if index < len(classes) else f"class {index}"


class Predictor:
    """A checkpoint folder, ready to name images. Needs nothing but that folder: images are prepared, and mirrored where
    `eval.flip_tta` is on, as its run evaluated them.

    checkpoint: one, or a run folder, which stands for its best one. weights: `raw`, `ema`, or None for those that made
    a run's checkpoint the best, or of a single checkpoint the average where it has one. allow_import: the factory and
    modules that its config may name besides the libraries' models. damage: a line for each better checkpoint that was
    passed over. Raises CheckpointError.
    """

    def __init__(
        self,
        checkpoint: Path,
        device: torch.device,
        weights: str | None = None,
        allow_import: Collection[str] = (),
    ):
        snapshot, best, self.damage = load_best(checkpoint)
        assert snapshot.path is not None
        config = config_of(snapshot.state, snapshot.path)
        models = _models_of(snapshot, config, allow_import)
        kind = weights or best or ("ema" if "ema" in models else "raw")
        if kind not in models:
            raise CheckpointError(f"{snapshot.path} holds no {kind} weights.\nIt holds: {', '.join(models)}.")
        self.path, self.kind = snapshot.path, kind
        self.model = models[kind].to(device)
        self.classes = tuple(snapshot.state["classes"])
        self.transform, self.flip = eval_transform(config.eval), config.eval.flip_tta
        preprocessing = snapshot.state["preprocessing"]
        self.preprocess = Preprocess(preprocessing["mean"], preprocessing["std"], device, config.train.channels_last)

    @torch.no_grad()
    def logits(self, images: Sequence[Tensor]) -> Tensor:
        """images: uint8 (3, H, W) of any sizes. Returns fp32 logits (B, C) on the CPU."""
        batch = torch.stack([self.transform(image) for image in images])
        return compute_logits(self.model, self.preprocess(batch), self.flip).cpu()

    def predict(self, paths: Sequence[Path], count: int = 5, with_logits: bool = False) -> Iterator[dict[str, Any]]:
        """A row for each file, in order: image, top (class, probability), and where asked for logits.

        Raises DataError for a file that is no image.
        """
        for start in range(0, len(paths), _BATCH):
            chunk = paths[start : start + _BATCH]
            logits = self.logits([read_image(path) for path in chunk])
            ranked = rank(logits, self.classes, count)
            for path, ranking, outputs in zip(chunk, ranked, logits.tolist(), strict=True):
                yield {"image": str(path), "top": ranking} | ({"logits": outputs} if with_logits else {})


def read_image(path: Path) -> Tensor:
    """One file as uint8 (3, H, W). Raises DataError that names it."""
    try:
        return decode_rgb(path.read_bytes())
    except (OSError, DataError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{path}: {reason}\nLeave it out, or give another file.") from error


def find_images(words: Sequence[str]) -> list[Path]:
    """Files, folders (searched through) and patterns, sorted for each word. Raises DataError for a word without any."""
    found: list[Path] = []
    for word in words:
        path = Path(word)
        if path.is_dir():
            matches = sorted(f for f in path.rglob("*") if is_image(os.fsencode(f.name)) and f.is_file())
        elif path.is_file():
            matches = [path]
        else:
            matches = sorted(Path(match) for match in glob.glob(word, recursive=True) if Path(match).is_file())  # noqa: PTH207 (absolute patterns, too)
        if not matches:
            kind = "holds no image" if path.is_dir() else "no such file, folder or pattern"
            raise DataError(
                f"{word}: {kind}.\nName image files, folders of images, or quoted patterns like 'photos/*.jpg'."
            )
        found += matches
    return found


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
