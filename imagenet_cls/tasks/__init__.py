"""What the targets of images mean: `data.labels`."""

from imagenet_cls.config.schema import Config
from imagenet_cls.tasks.multi_label import MultiLabel
from imagenet_cls.tasks.single_label import SingleLabel

Task = SingleLabel | MultiLabel


def task_of(config: Config) -> Task:
    """The task of a config."""
    if config.data.labels == "multi":
        return MultiLabel(config.eval.threshold)
    return SingleLabel()
