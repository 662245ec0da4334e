"""`tools/publish.py`: write a trained timm model as a folder for timm and the Hugging Face Hub."""

import re
from collections.abc import Sequence

from imagenet_cls.commands import cli
from imagenet_cls.errors import UsageError
from imagenet_cls.text import printable

_FILES = "model.safetensors, config.json and README.md"


def publish_command(argv: Sequence[str]) -> None:
    """Write the folder. Raises UsageError for models of other libraries."""
    parser = cli.build_parser(
        "publish", "Write a trained timm model as a folder for timm and the Hugging Face Hub."
    )
    cli.add_weights_arguments(parser, "DIR")
    parser.add_argument("--out", type=cli.path, metavar="DIR", help="the same as DIR")
    parser.add_argument(
        "--license", metavar="ID", help="of the model, as the Hub names it, such as apache-2.0"
    )
    parser.add_argument("--overwrite", action="store_true", help=f"replace {_FILES} in DIR")
    arguments = parser.parse_intermixed_args(argv)
    options, folders = cli.weights_arguments(arguments)
    folder = cli.output_folder(arguments.out, folders)
    if folder.is_file():
        raise UsageError(f"{folder} is a file.", "Give a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not arguments.overwrite:
        raise UsageError(
            f"{folder} exists and is not empty.", "Give another folder, or --overwrite."
        )
    if (folder / "manifest.json").exists():
        raise UsageError(f"{folder} is a checkpoint.", "Give another folder.")
    if arguments.license is not None and not re.fullmatch(r"[\w.-]+", arguments.license):
        raise UsageError(
            f"--license {printable(arguments.license)}: not an identifier.",
            "Give one, such as apache-2.0.",
        )
    from imagenet_cls.extras.weights.timm_folder import write_folder
    from imagenet_cls.inference.predictor import Predictor

    predictor = Predictor(**options, device="cpu")
    write_folder(predictor, folder, arguments.license)
    for line in predictor.warnings:
        print(printable(line))
    print(f"wrote {_FILES} of {predictor.path} ({predictor.weights}) to {folder}")
