"""What a run reports: metrics.jsonl, TensorBoard, plots, the console and the log files."""
