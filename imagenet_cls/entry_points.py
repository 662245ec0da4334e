"""The commands, the kinds of datasets, and what the core calls of `imagenet_cls.extras`, by name.

The core trains, evaluates and predicts. It imports nothing of the extras, which read the files that
it writes, or prepare the files that it reads.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from imagenet_cls.errors import UsageError

# Function and description of each command. A function is imported when it is used.
COMMANDS = {
    "train": ("commands.train:train_command", "train on a dataset, or from a config"),
    "test": (
        "commands.test:evaluate_command",
        "evaluate a checkpoint, foreign weights or published weights",
    ),
    "predict": (
        "commands.predict:predict_command",
        "classify images with a checkpoint or an ONNX file",
    ),
    "export": ("extras.weights.export:export_command", "write a model as ONNX or torch.export"),
    "report": ("extras.pages.report:report_command", "write a page about one run or several"),
    "publish": (
        "extras.weights.publish:publish_command",
        "write a timm model as a folder for the Hugging Face Hub",
    ),
    "configs": ("commands.configs:configs_command", "list the shipped configs"),
    "print-config": ("commands.print_config:print_config_command", "print a resolved config"),
    "sweep": (
        "extras.sweep.command:sweep_command",
        "train a grid of settings, seeds or folds",
    ),
    "show-batch": (
        "extras.before_training.show_batch:show_batch_command",
        "draw the training images as the model gets them",
    ),
    "find-lr": (
        "extras.before_training.find_lr:find_lr_command",
        "plot the loss over a range of learning rates",
    ),
    "prepare-imagenet": (
        "extras.datasets.prepare_imagenet:prepare_command",
        "unpack the archives of ImageNet",
    ),
    "pack": ("extras.datasets.pack:pack_command", "pack a dataset into WebDataset shards"),
    "verify-data": (
        "extras.datasets.verify_data:verify_command",
        "read every image of a dataset, and list the bad ones",
    ),
    "check-dist": (
        "extras.machine.check_dist:check_command",
        "check that the ranks can communicate",
    ),
}


class DataOpener(NamedTuple):
    """A kind of datasets.

    module: has `open_part(config, part, classes)`, which returns the `data.image_set.ImageSet` of a
    part of the section `data`, and `problems(config)`, which returns the problems of its arguments.
    has_paths: whether parts are paths below `data.root`. supports_multilabel: whether `data.labels`
    may be multi.
    """

    module: str
    has_paths: bool = False
    supports_multilabel: bool = False


# By the form of `data.name`.
DATA_OPENERS = {
    "folder": DataOpener("data.files", has_paths=True, supports_multilabel=True),
    "list": DataOpener("data.files", has_paths=True, supports_multilabel=True),
    "digits": DataOpener("data.builtin", has_paths=True),
    "synthetic": DataOpener("data.synthetic"),
    "torchvision:NAME": DataOpener("data.torchvision_sets"),
    "hf:USER/NAME": DataOpener("extras.datasets.hub", supports_multilabel=True),
    "my_module:my_factory": DataOpener("data.map_style", supports_multilabel=True),
}

# What a part of the core calls for an option, a method or a value.
EXTRAS = {
    "Predictor.features": "extras.weights.feature_model:FeatureModel",
    "test.py --report": "extras.pages.evaluation_report:EvaluationReport",
    "predict.py --report": "extras.pages.predictions:PredictionsPage",
    "TrainedRun.report": "extras.pages.report:report_command",
    "TrainedRun.plot": "extras.pages.report:plot_run",
    "log.writers=wandb": "extras.trackers:Wandb",
    "first batch": "extras.before_training.show_batch:write_first_batch",
    "log.plots": "extras.pages.report:write_plots",
    "log.report": "extras.pages.report:write_run_page",
}


def load_command(name: str) -> Callable[..., Any]:
    """The function of a command. Raises UsageError if its module is not installed."""
    return _load(COMMANDS[name][0], name)


def load_extra(name: str) -> Callable[..., Any]:
    """What `EXTRAS` has for a name. Raises UsageError if its module is not installed."""
    return _load(EXTRAS[name], name)


def data_opener(name: str) -> DataOpener | None:
    """The entry of `DATA_OPENERS` for a value of `data.name`; None if there is none."""
    kind, colon, _ = name.partition(":")
    if not colon:
        return DATA_OPENERS.get(name)
    for form, opener in DATA_OPENERS.items():
        if form.startswith(f"{kind}:"):
            return opener
    return DATA_OPENERS["my_module:my_factory"]


def load_opener(name: str) -> Any:
    """The module of a `data_opener`. Raises UsageError if it is not installed."""
    opener = data_opener(name)
    assert opener is not None, name
    return _load_module(opener.module, f"data.name={name}")


def _load(place: str, name: str) -> Callable[..., Any]:
    module, _, attribute = place.partition(":")
    loaded: Callable[..., Any] = getattr(_load_module(module, name), attribute)
    return loaded


def _load_module(name: str, user: str) -> ModuleType:
    """A module of the package. user: what needs it, for the message."""
    module = f"imagenet_cls.{name}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a library is missing, not the module
        raise UsageError(
            f"{user} needs {module}, which is not installed.", "Install imagenet-cls as a whole."
        ) from None
