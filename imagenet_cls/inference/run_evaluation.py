"""One rank's part of the command `test`: evaluate weights, print the results and write them."""

import io
from dataclasses import dataclass, field
from pathlib import Path

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


@dataclass(frozen=True)
class EvaluationOptions:
    """The options of `tools/test.py`."""

    weights: WeightsSource = field(default_factory=WeightsSource)
    test_set: Path | None = None  # a separate test set
    list_root: str | None = None  # the folder that the paths in a list are relative to
    out: Path | None = None  # the file of predictions
    results: Path | None = None  # the file of results
    report: Path | None = None  # the folder of the page
    link_js: bool = False  # link to plotly's JavaScript from the page
    knn: int | None = None  # classify by this many neighbors
    linear_probe: float | None = None  # classify by logistic regression


def run_evaluation(config: Config, options: EvaluationOptions, context: RankContext) -> None:
    """Evaluate weights, and print and write what the options ask for. A collective."""
    # Use the kernels that the run used for its own evaluations.
    set_deterministic(config.train.deterministic, context.device)
    test_set = None
    if options.test_set is not None:
        test_set = locate_test_set(options.test_set, config.data, options.list_root)
    with explain_device_errors():
        if options.knn or options.linear_probe:
            evaluate_features = load_extra("test.py --knn, --linear-probe")
            lines = evaluate_features(
                config, options.weights, context, test_set, options.knn, options.linear_probe
            )
            if context.is_main:
                print("\n".join(map(printable, lines)))
            return
        record = options.out is not None or options.report is not None
        evaluation = evaluate_weights(config, options.weights, context, test_set, record)
    if context.is_main:
        print("\n".join(map(printable, evaluation.messages)))
        for kind, result in evaluation.results.items():
            texts = describe_result(result, 3, len(evaluation.images.classes))
            print(f"{kind}: {'  '.join(texts)}")
        for line in class_table(evaluation):
            print(line)
        write_evaluation(evaluation, options)


def write_evaluation(evaluation: WeightsEvaluation, options: EvaluationOptions) -> None:
    """Write the files that the options name. Raises UsageError or ResourceError."""
    if options.results is not None:
        write_output(options.results, finite_json(evaluation.results), "--results")
    if options.out is not None:
        text = io.StringIO(newline="")
        rows = prediction_rows(evaluation)
        is_csv = options.out.suffix.lower() == ".csv"
        write_predictions(text, rows, is_csv, evaluation.threshold is not None)
        # surrogateescape: an image's name may be any bytes.
        write_output(options.out, text.getvalue().encode("utf-8", "surrogateescape"))
        print(f"wrote {len(evaluation.images)} predictions to {options.out}")
    if options.report is not None:
        load_extra("test.py --report")(options.report, options.link_js).write(evaluation)
        print(f"wrote {options.report / 'report.html'}")
