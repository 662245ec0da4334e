"""What a run reports: metrics.jsonl, TensorBoard, plots, the console and the log files."""

from imagenet_cls.report.jsonl import MetricsFile, Record, read_metrics, truncate_after
from imagenet_cls.report.log import close_log, open_log
from imagenet_cls.report.reporter import Reporter

__all__ = ["MetricsFile", "Record", "Reporter", "close_log", "open_log", "read_metrics", "truncate_after"]
