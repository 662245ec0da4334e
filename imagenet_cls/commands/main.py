"""The start of every command, for `tools/` and the console script `imagenet-cls`."""

import os
import sys
from importlib import import_module

from imagenet_cls.commands import check_start
from imagenet_cls.lookup import did_you_mean
from imagenet_cls.versions import __version__

# Function and description. The function's module has the name of the command, and is imported when
# the command runs.
COMMANDS = {
    "train": ("train_command", "train on a dataset, or from a config"),
    "test": ("evaluate_command", "evaluate a checkpoint, foreign weights or published weights"),
    "predict": ("predict_command", "classify images with a checkpoint or an ONNX file"),
    "export": ("export_command", "write a model as ONNX or torch.export"),
    "report": ("report_command", "write a page about one run or several"),
    "publish": ("publish_command", "write a timm model as a folder for the Hugging Face Hub"),
    "configs": ("configs_command", "list the shipped configs"),
    "print-config": ("print_config_command", "print a resolved config"),
    "sweep": ("sweep_command", "train a grid of settings, seeds or folds, or search settings"),
    "plot-schedule": ("plot_schedule_command", "plot the learning rate of a config"),
    "show-batch": ("show_batch_command", "draw the training images as the model gets them"),
    "find-batch": ("find_batch_command", "find the largest micro-batch that fits on a device"),
    "find-lr": ("find_lr_command", "plot the loss over a range of learning rates"),
    "prepare-imagenet": ("prepare_command", "unpack the archives of ImageNet"),
    "pack": ("pack_command", "pack a dataset into WebDataset shards"),
    "verify-data": ("verify_command", "read every image of a dataset, and list the bad ones"),
    "average-checkpoints": ("average_command", "average the weights of checkpoints"),
    "check-dist": ("check_command", "check that the ranks can communicate"),
    "check-gpu": ("check_gpu_command", "check training on the GPUs of this machine by short runs"),
}


def main(name: str | None = None) -> None:
    """Run a command with the arguments of this process; without `name` the one that the first
    argument names.
    """
    if name is None:
        name = sys.argv[1] if len(sys.argv) > 1 else ""
        del sys.argv[1:2]
    if name in COMMANDS:
        if name == "check-gpu":
            os.environ["IMAGENET_CLS_NO_REPORTS"] = "1"
        check_start()
        from imagenet_cls.commands import cli

        module = import_module(f"imagenet_cls.commands.{name.replace('-', '_')}")
        cli.main(getattr(module, COMMANDS[name][0]))
    elif name in ("", "-h", "--help"):
        print("usage: imagenet-cls COMMAND [--help] [arguments]\n\nCommands:")
        print("\n".join(f"  {command:<20} {text}" for command, (_, text) in COMMANDS.items()))
    elif name == "--version":
        print(__version__)
    else:
        problem = f"no command {name!r}{did_you_mean(name, COMMANDS)}"
        print(f"imagenet-cls: {problem}\nSee imagenet-cls --help.", file=sys.stderr)
        sys.exit(2)
