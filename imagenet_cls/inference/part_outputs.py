"""The outputs of models for all images of both parts of a dataset, such as their features."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from imagenet_cls.config.schema import Config, DataConfig
from imagenet_cls.data.classes import may_lack_classes
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.data.image_set import ImageSet
from imagenet_cls.data.test_set import describe_images
from imagenet_cls.engine.build import rank_devices
from imagenet_cls.engine.evaluate import Evaluation
from imagenet_cls.inference.evaluate_weights import check_not_trained_on, open_images
from imagenet_cls.inference.load_weights import (
    TrainedModels,
    WeightsSource,
    describe_weights,
    load_on_all_ranks,
    prepare_models,
)
from imagenet_cls.parallel.collectives import gather_shards, run_on_main
from imagenet_cls.parallel.process_group import RankContext


@dataclass(frozen=True)
class PartOutputs:
    """train, val: the outputs of each kind of weights, fp32 (N, D), on the CPU. train_targets,
    val_targets: int64 (N,). Other ranks than 0 have their shards. messages: lines about the images
    and the weights.
    """

    train: Mapping[str, Tensor]
    train_targets: Tensor
    val: Mapping[str, Tensor]
    val_targets: Tensor
    messages: list[str]


def part_outputs(
    config: Config,
    weights: WeightsSource,
    context: RankContext,
    wrap: Callable[[nn.Module, int], nn.Module],
    test_set: DataConfig | None = None,
) -> PartOutputs:
    """Compute the outputs for the training and the validation images, both prepared as for
    evaluation. A collective.

    wrap: from a model and the number of its classes to what computes the outputs. test_set: in
    place of the validation images. Raises DataError without training images.
    """
    if test_set is None:
        data = open_datasets(config.data, ("train", "val"), allow_missing=may_lack_classes(config))
        images = data.val
    else:
        data = open_datasets(config.data, ("train",))
        images = open_images(config, test_set, data.classes)
    trained = load_on_all_ranks(config, weights, data.classes, context, ignore_head=True)
    messages = [
        describe_images(test_set or config.data, images),
        *describe_weights(config, trained),
    ]
    if test_set is not None:
        messages += run_on_main(
            context, lambda: check_not_trained_on(config, trained, test_set, images)
        )
    if data.note is not None:
        messages.append(data.note)
    messages += prepare_models(trained, config, context)
    models = {name: wrap(model, trained.num_classes) for name, model in trained.models.items()}
    train, train_targets = _all_outputs(config, trained, models, data.train, context)
    val, val_targets = _all_outputs(config, trained, models, images, context)
    return PartOutputs(train, train_targets, val, val_targets, messages)


def _all_outputs(
    config: Config,
    trained: TrainedModels,
    models: Mapping[str, nn.Module],
    source: ImageSet,
    context: RankContext,
) -> tuple[dict[str, Tensor], Tensor]:
    """The outputs of each model, and the targets, in the order of `source`."""
    shard: dict[str, list[Tensor]] = {name: [] for name in (*models, "targets", "indices")}
    # features are not outputs of classes, of which some could be absent
    config = replace(config, eval=replace(config.eval, classes="all"))
    evaluation = Evaluation(
        config,
        source,
        context,
        rank_devices(config, context),
        trained.mean,
        trained.std,
    )
    for outputs, targets, indices in evaluation.outputs(models):
        for name, rows in {**outputs, "targets": targets, "indices": indices}.items():
            shard[name].append(rows.cpu())
    gathered = {}
    for name, parts in shard.items():
        rows = torch.cat(parts) if parts else torch.empty(0)  # a shard may be empty
        parts.clear()
        gathered[name] = gather_shards(rows, len(source), context)
    targets = gathered.pop("targets")
    indices = gathered.pop("indices")
    assert not context.is_main or torch.equal(indices, torch.arange(len(source)))
    return gathered, targets
