"""Train the same small ResNet on Fashion-MNIST with this package, timm's train.py and a plain loop.

    python benchmarks/train_peers.py DATA_ROOT OUT [TRAIN_PY] [--seeds 0 1 2] [--epochs 3]

TRAIN_PY: `train.py` of timm's repository, unchanged. Model, batch size, optimizer, decay groups,
schedule and flips are the same. All use fp32, one thread and one data worker; each has its own
random number generator. Prints top-1 of the last epoch, wall time and CPU time of each run, and the
mean and standard deviation over the seeds. Runs that OUT has are not repeated.
"""

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

import timm
import torch
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.transforms import v2

ROOT = Path(__file__).resolve().parents[1]
LAYERS, CHANNELS = [1, 1, 1, 1], [16, 32, 64, 128]
BATCH, LR, MOMENTUM, DECAY = 128, 0.1, 0.9, 5e-4
SIZE, MEAN, STD = 28, 0.2860, 0.3530
Run = Callable[[argparse.Namespace, int, Path], float]


def run_ours(arguments: argparse.Namespace, seed: int, folder: Path) -> float:
    """Top-1 of this package."""
    model = f"{{layers: {LAYERS}, channels: {CHANNELS}}}"
    command = [sys.executable, str(ROOT / "tools" / "train.py")]
    command += [str(ROOT / "configs" / "fashion_mnist" / "resnet20.yaml")]
    command += [f"data.root={arguments.data_root}", f"seed={seed}", "device=cpu"]
    command += ["model.name=resnet18", f"model.kwargs={model}", "augment.pad_px=0"]
    command += [f"train.epochs={arguments.epochs}", f"optimizer.lr={LR}"]
    command += ["optimizer.norm_weight_decay=0", "optimizer.bias_weight_decay=0"]
    command += ["schedule={name: cosine, by_epoch: false, kwargs: {}}"]
    command += ["--work-dir", str(folder / "run"), "--overwrite"]
    subprocess.run(command, check=True, stdout=(folder / "log").open("w"))
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    return [record["top1_pct"] for record in records if record["kind"] == "eval"][-1]


def run_timm(arguments: argparse.Namespace, seed: int, folder: Path) -> float:
    """Top-1 of timm's train.py, with a cosine schedule stepped at each update."""
    command = [sys.executable, str(arguments.train_py), "--dataset", "torch/fashion_mnist"]
    command += ["--data-dir", str(arguments.data_root), "--seed", str(seed), "--device", "cpu"]
    command += ["--model", "resnet18", "--num-classes", "10", "--in-chans", "1"]
    command += ["--model-kwargs", f"layers={LAYERS}", f"channels={CHANNELS}"]
    command += ["--input-img-mode", "L", "--input-size", "1", str(SIZE), str(SIZE)]
    command += ["--mean", str(MEAN), "--std", str(STD), "--crop-pct", "1", "--scale", "1", "1"]
    command += ["--ratio", "1", "1", "--hflip", "0.5", "--color-jitter", "0", "--channels-last"]
    command += ["--opt", "momentum", "--momentum", str(MOMENTUM), "--weight-decay", str(DECAY)]
    command += ["--lr", str(LR), "--sched", "cosine", "--sched-on-updates", "--min-lr", "0"]
    command += ["--warmup-epochs", "0", "--epochs", str(arguments.epochs), "--smoothing", "0"]
    command += ["--batch-size", str(BATCH), "--workers", "1", "--no-prefetcher"]
    command += ["--output", str(folder), "--experiment", "run"]
    subprocess.run(command, check=True, stderr=subprocess.STDOUT, stdout=(folder / "log").open("w"))
    with (folder / "run" / "summary.csv").open() as file:
        return float(list(csv.DictReader(file))[-1]["eval_top1"])


def run_plain(arguments: argparse.Namespace, seed: int, folder: Path) -> float:
    """Top-1 of `plain_loop`, in a process of its own."""
    words = [str(arguments.data_root), str(folder), "--epochs", str(arguments.epochs)]
    command = [sys.executable, __file__, *words, "--plain", str(seed)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


def plain_loop(root: Path, seed: int, epochs: int) -> float:
    """A loop as in PyTorch's tutorials, with a DataLoader. Returns top-1 in percent."""
    torch.manual_seed(seed)
    to_tensor = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    normalize = v2.Normalize([MEAN], [STD])
    train_transform = v2.Compose([v2.RandomHorizontalFlip(), *to_tensor, normalize])
    train_set = datasets.FashionMNIST(str(root), train=True, transform=train_transform)
    test_set = datasets.FashionMNIST(
        str(root), train=False, transform=v2.Compose([*to_tensor, normalize])
    )
    loader = DataLoader(
        train_set, BATCH, shuffle=True, num_workers=1, drop_last=True, persistent_workers=True
    )
    model = timm.create_model(
        "resnet18", num_classes=10, in_chans=1, layers=LAYERS, channels=CHANNELS
    ).to(memory_format=torch.channels_last)
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD(
        [{"params": weights, "weight_decay": DECAY}, {"params": others}], LR, MOMENTUM
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    for _ in range(epochs):
        model.train()
        for images, targets in loader:
            logits = model(images.to(memory_format=torch.channels_last))
            optimizer.zero_grad()
            functional.cross_entropy(logits, targets).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        hits = [
            (model(images.to(memory_format=torch.channels_last)).argmax(1) == targets).sum().item()
            for images, targets in DataLoader(test_set, 500)
        ]
    return 100 * sum(hits) / len(test_set)


PROGRAMS: dict[str, Run] = {"ours": run_ours, "timm": run_timm, "plain": run_plain}


def measure(run: Run, arguments: argparse.Namespace, seed: int, folder: Path) -> dict[str, float]:
    """Top-1, wall seconds and CPU seconds of a run; kept in `folder`."""
    file = folder / "result.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        top1 = run(arguments, seed, folder)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        result = {"top1_pct": top1, "wall_sec": time.perf_counter() - started, "cpu_sec": cpu}
        file.write_text(json.dumps(result))
    loaded: dict[str, float] = json.loads(file.read_text())
    return loaded


def main() -> None:
    """Run the programs in turn, so that a change of the machine's speed affects all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data_root", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "train_py", type=Path, nargs="?", help="timm's train.py; without it, timm is not run"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--plain", type=int, metavar="SEED", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plain is not None:
        torch.set_num_threads(1)
        print(plain_loop(arguments.data_root, arguments.plain, arguments.epochs))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    programs = {name: run for name, run in PROGRAMS.items() if name != "timm" or arguments.train_py}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for seed in arguments.seeds:
        for name, run in programs.items():
            result = measure(
                run, arguments, seed, arguments.out / f"{name}_{seed}_{arguments.epochs}"
            )
            results[name].append(result)
            print(name, seed, result, flush=True)
    for name, found in results.items():
        top1 = [result["top1_pct"] for result in found]
        spread = stdev(top1) if len(top1) > 1 else 0.0
        wall, cpu = (mean(result[key] for result in found) for key in ("wall_sec", "cpu_sec"))
        text = f"top-1 {mean(top1):.2f} +- {spread:.2f}, {wall:.0f} s, {cpu:.0f} CPU s"
        print(f"{name}: {text}")


if __name__ == "__main__":
    main()
