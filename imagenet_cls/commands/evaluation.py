"""One rank's part of the command `test`: evaluate weights, print the results and write them."""

import argparse
import io

from imagenet_cls.commands.own_data import key_of
from imagenet_cls.config.schema import Config
from imagenet_cls.data.test_set import locate_test_set
from imagenet_cls.engine.precision import set_deterministic
from imagenet_cls.entry_points import load_extra
from imagenet_cls.files import write_output
from imagenet_cls.guards.device import explain_device_errors
from imagenet_cls.inference.evaluate_weights import (
    WeightsEvaluation,
    class_table,
    evaluate_weights,
    prediction_rows,
)
from imagenet_cls.inference.load_weights import WeightsSource
from imagenet_cls.inference.prediction_files import write_predictions
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.report.jsonl import describe_result, finite_json
from imagenet_cls.text import printable


def run_evaluation(arguments: argparse.Namespace, config: Config, context: RankContext) -> None:
    """Evaluate weights, and print and write what the arguments ask for. A collective."""
    # Use the kernels that the run used for its own evaluations.
    set_deterministic(config.train.deterministic, context.device)
    weights = WeightsSource(arguments.checkpoint, arguments.weights, arguments.allow_import)
    test_set = None
    if arguments.data is not None:
        list_root = config.data.root if "data.root" in map(key_of, arguments.overrides) else None
        test_set = locate_test_set(arguments.data, config.data, list_root)
    with explain_device_errors(remedy="Try a smaller eval.batch_size, or device=cpu."):
        record = arguments.out is not None or arguments.report is not None
        evaluation = evaluate_weights(config, weights, context, test_set, record)
    if context.is_main:
        print("\n".join(map(printable, evaluation.messages)))
        for kind, result in evaluation.results.items():
            texts = describe_result(result, 3, len(evaluation.images.classes))
            print(f"{kind}: {'  '.join(texts)}")
        for line in class_table(evaluation):
            print(line)
        write_evaluation(evaluation, arguments)


def write_evaluation(evaluation: WeightsEvaluation, arguments: argparse.Namespace) -> None:
    """Write the files that the arguments name. Raises UsageError or ResourceError."""
    out, report = arguments.out, arguments.report
    if arguments.results is not None:
        write_output(arguments.results, finite_json(evaluation.results), "--results")
    if out is not None:
        text = io.StringIO(newline="")
        is_csv = out.suffix.lower() == ".csv"
        write_predictions(text, prediction_rows(evaluation), is_csv, evaluation.task)
        # surrogateescape: an image's name may be any bytes.
        write_output(out, text.getvalue().encode("utf-8", "surrogateescape"))
        print(f"wrote {len(evaluation.images)} predictions to {out}")
    if report is not None:
        load_extra("test.py --report")(report).write(evaluation)
        print(f"wrote {report}")
