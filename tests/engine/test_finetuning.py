"""docs/your_data.md and docs/finetuning.md: every command runs as it stands there, on the digits
and small models; and fine-tuning carries over what was learned.
"""

import re
import shlex
import shutil
from collections import Counter
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from helpers import (
    REPOSITORY,
    arguments,
    assert_resumes,
    call,
    digits_as_rows,
    evaluations,
    fails,
    newest,
    state_of,
    succeeds,
    train_here,
    write_files,
)
from safetensors.torch import load_file, save_file

from imagenet_cls.checkpoint.format import checkpoint_path
from imagenet_cls.commands.predict import predict_command
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.engine.stored_weights import open_weights
from imagenet_cls.extras.before_training.find_lr import find_lr_command
from imagenet_cls.extras.datasets.pack import pack_command
from imagenet_cls.extras.datasets.verify_data import verify_command

PAGE = (REPOSITORY / "docs" / "finetuning.md").read_text()
# The page continues from the first run of docs/your_data.md.
FIRST_RUN = ("train", "photos")
YOUR_DATA, COMMANDS = (
    re.findall(r"^python tools/(\w+)\.py ([^#\n]*)", text, re.MULTILINE)  # without comments
    for text in ((REPOSITORY / "docs" / "your_data.md").read_text(), PAGE)
)
FILES = dict(re.findall(r"```yaml\n# ([\w.]+)\n(.*?)```", PAGE, re.DOTALL))
TOOLS = {
    "train": train_command,
    "test": evaluate_command,
    "find_lr": find_lr_command,
    "predict": predict_command,
    "pack": pack_command,
    "verify_data": verify_command,
}
# Small ones in place of what the page names.
SMALL = {
    "vit_base_patch16_224.mae": "test_vit",
    "vit_small_patch16_224": "test_vit",
    "resnet18": "test_resnet",
    "resnet50": "test_resnet",
    "176": "24",
    "224": "32",
    "288": "48",
}
CONFIG = "configs/finetune/own_dataset.yaml"
# Of the trainings in docs/your_data.md.
SHORT = (
    "model.pretrained=false model.name=test_resnet augment.size_px=32 eval.crop_px=32 "
    "data.num_workers=0 train.max_steps=4 log.tensorboard=false log.plots=false log.report=false"
)


# ---- the pages


def with_small_models(tool: str, words: list[str], weights: Path) -> list[str]:
    """The page's words, with small models and images, and two epochs.

    Whether a run starts from published weights is left to the words and the config; if it does,
    timm reads them from a file of the test's instead of its hub.
    """
    small = [re.sub("|".join(SMALL), lambda match: SMALL[match[0]], word) for word in words]
    sizes = [
        f"{key}=32"
        for key in ("augment.size_px", "eval.crop_px")
        if not any(key in word or word.startswith("size=") for word in words)
    ]
    added = [*sizes, "data.num_workers=0", "eval.crop_pct=1.0"]
    family = "vit" if any("vit" in word for word in words) else "resnet"
    overlay = f"model.kwargs.pretrained_cfg_overlay.file={weights / family}.safetensors"
    if words[0] == "photos":  # the config of the package, not that of the test
        added.append("train.global_batch_size=64")
        if not any(word.startswith("model=") for word in words):
            added.append("model=test_resnet")
    if tool == "find_lr":
        added += [overlay, "--steps", "20"]
    if tool == "train":
        added.append("--dry-run" if words[0].startswith("my_") else overlay)
        added += ["train.max_steps=8", "log.tensorboard=false", "log.report=false"]  # two epochs
    return small + added


@pytest.mark.nightly
def test_every_command_of_finetuning_md_runs(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REPOSITORY / "configs", tmp_path / "configs")
    small = (tmp_path / CONFIG).read_text().replace("name: resnet50.a1_in1k", "name: test_resnet")
    (tmp_path / CONFIG).write_text(small)
    (tmp_path / "photos").mkdir()
    for number in "12":
        (tmp_path / "photos" / number).symlink_to(digits / "train" / number)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text.replace("torchvision:resnet50", "torchvision:resnet18"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(
        torchvision.models.resnet18().state_dict(),
        tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth",
    )
    for kind in ("resnet", "vit"):
        torch.manual_seed(0)
        save_file(
            timm.create_model(f"test_{kind}", num_classes=1000).state_dict(),
            tmp_path / f"{kind}.safetensors",
        )
    (tmp_path / "start.safetensors").symlink_to("resnet.safetensors")
    torch.save(
        {"model": timm.create_model("test_vit", num_classes=0).state_dict()},
        "mae_pretrain_vit_base.pth",
    )

    assert len(COMMANDS) >= 15 and FILES
    for tool, line in [FIRST_RUN, *COMMANDS]:
        words = with_small_models(tool, shlex.split(line), tmp_path)
        out = succeeds(TOOLS[tool], *words)
        if tool == "train":
            (start,) = (text for text in out.splitlines() if text.startswith("starts from "))
            match = re.search(r"model.checkpoint=(\S+)", line)
            source = f"the weights of {match[1]}" if match else "published weights ("
            assert start.startswith(f"starts from {source}"), (line, start)
            is_new = "model.checkpoint=work_dirs/" not in line
            assert ("newly initialized" in start) == is_new, (line, start)
    frozen = load_file(newest(Path("work_dirs/head")) / "model.safetensors")
    published = load_file("resnet.safetensors")
    assert all(
        torch.equal(frozen[name], published[name])
        for name in published
        if not name.startswith("fc.")
    )
    log = Path("work_dirs/vit_48/logs/rank0.log").read_text()
    assert "Resized position embedding: (10, 10) to (3, 3)" in log


@pytest.mark.nightly
def test_every_command_of_your_data_md_runs(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REPOSITORY / "configs", "configs")
    for digit, name in (("1", "cat"), ("2", "dog")):
        shutil.copytree(digits / "train" / digit, f"photos/{name}")
    shutil.make_archive("photos", "zip", "photos")
    for part in ("train", "val"):
        shutil.copytree("photos", f"dataset/{part}")
    shutil.copytree("photos/cat", "new_photos")
    lines = [f"{path},{path.parent.name}\n" for path in sorted(Path("photos").rglob("*.jpg"))]
    text = "image,label\n" + "".join(lines)
    files = {"labels.csv": text, "test.csv": text}
    for part in ("train", "val"):  # with paths relative to their folder
        files[f"photos/{part}.csv"] = text.replace("photos/", "")
    write_files(tmp_path, files)
    shutil.copytree("photos", "testset")
    shutil.make_archive("testset", "zip", ".", "testset")
    Path("hub/data").mkdir(parents=True)
    pytest.importorskip("datasets").disable_progress_bars()
    rows = digits_as_rows(digits).shard(20, 0, contiguous=False)
    for part in ("train", "validation"):
        rows.to_parquet(f"hub/data/{part}-00000-of-00001.parquet")

    done = []
    for tool, line in YOUR_DATA:
        # A folder of Parquet files in place of a dataset of the Hub.
        words = shlex.split(re.sub(r"hf:\S+", "hf:./hub", line))
        if any(name in line for name in ("cifar", "imagenette")):
            continue  # a download: tests/commands/test_train_on_data.py
        code, out, err = call(TOOLS[tool], *words, *(SHORT.split() if tool == "train" else ()))
        if tool == "predict":
            assert err.startswith("used the ")
            err = ""
        assert (code, err) == (0, ""), (words, out, err)
        if tool == "train":
            assert "\nbest top-1 (raw weights" in out
        done.append(tool)
    counts = {"train": 12, "test": 5, "predict": 1, "pack": 1, "verify_data": 1}
    assert Counter(done) == counts
    assert len(list(Path("work_dirs").iterdir())) == 12


# ---- keys of the runs


def test_resume_of_a_frozen_run_gives_the_same_bits(digits: Path, tmp_path: Path) -> None:
    words = {"model.name": "test_resnet", "model.freeze": "[conv1.*,bn1.*,layer1.*]"}
    assert_resumes(digits, tmp_path, 2, **words, ema__decay=0.9, train__max_steps=4)
    momenta = load_file(newest(tmp_path / "whole") / "optimizer.safetensors")
    assert not any(key.startswith("layer1.") for key in momenta)


def test_split_batch_norm_run_starts_a_plain_model(digits: Path, tmp_path: Path) -> None:
    """A BatchNorm for each view of AugMix; a plain model takes the weights; test.py repeats the
    run's figures.
    """
    run = tmp_path / "run"
    words = {
        "model.name": "test_resnet",
        "loss.name": "jsd",
        "augment.splits": 3,
        "model.split_bn": "true",
        "log.tensorboard": "true",  # with a picture of 16 images in three views
        "train.global_batch_size": 16,
    }
    train_here(arguments(digits, run, **words, augment__policy="augmix-m3-w3", train__max_steps=2))
    weights = load_file(newest(run) / "model.safetensors")
    splits = [weights[f"bn1.{part}running_mean"] for part in ("", "aux_bn.0.", "aux_bn.1.")]
    assert not torch.equal(splits[0], splits[1]) and not torch.equal(splits[1], splits[2])
    out = succeeds(evaluate_command, *arguments(digits, run)[:-2], run)
    assert f"top-1 {evaluations(run)[-1]['top1_pct']:.3f} %" in out
    start = {"model.name": "test_resnet", "model.checkpoint": run, "train.max_steps": 1}
    train_here(arguments(digits, tmp_path / "plain", **start))


def test_checkpoint_at_another_size_is_resized_or_an_error(digits: Path, tmp_path: Path) -> None:
    """A fixed-size ViT is resized, reported; one that can't be is an error that names the key."""
    tiny = {
        "model.kwargs.depth": 1,
        "model.kwargs.img_size": 32,
        "augment.size_px": 32,
        "train.max_steps": 1,
    }
    vit = {"model.name": "vit_tiny_patch16_224", **tiny, "eval.crop_px": 32}
    train_here(arguments(digits, tmp_path / "vit", **vit, ema__decay=0.5))
    words = arguments(digits, tmp_path / "vit", **{"eval.crop_px": "[48, 64]"})[:-2]
    out = succeeds(evaluate_command, *words, tmp_path / "vit")
    assert "resized for 48 x 64 px" in out and out.count("over 359 images") == 2
    train_here(arguments(digits, tmp_path / "plain", train__max_steps=1))
    err = fails(2, evaluate_command, *words, tmp_path / "plain", "--allow-import", "helpers:plain")
    assert ": eval.crop_px: " in err
    words = arguments(digits, tmp_path / "no", **(vit | {"eval.crop_px": 64}))
    assert "eval.crop_px" in fails(2, train_command, *words)


@pytest.fixture(scope="module")
def noisy_run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("noisy") / "run"
    changes = {"ema__decay": 0.5, "train__max_steps": 12, "checkpoint__keep_last": "null"}
    train_here(arguments(digits, folder, "noisy", **changes))
    return folder


def test_start_from_a_run_uses_its_best_weights(noisy_run: Path) -> None:
    best = state_of(noisy_run)["progress"]["best"]
    kind = max(best, key=lambda name: best[name]["top1_pct"])
    step = checkpoint_path(noisy_run / "checkpoints", best[kind]["step"])
    file = {"raw": "model.safetensors", "ema": "ema.safetensors"}[kind]
    expected = load_file(step / file)
    for source in (noisy_run, step):
        found = open_weights(source).tensors
        assert all(torch.equal(weight, expected[name]) for name, weight in found.items())


def test_start_from_a_damaged_run_falls_back_or_is_an_error(
    digits: Path, tmp_path: Path, noisy_run: Path
) -> None:
    run = tmp_path / "run"
    changes = {"model.checkpoint": run, "train.max_steps": 1}
    words = arguments(digits, tmp_path / "next", "noisy", **changes)
    assert str(run) in fails(4, train_command, *words)
    shutil.copytree(noisy_run, run)
    damaged = newest(run)
    (damaged / "model.safetensors").write_bytes(b"")
    out = succeeds(train_command, *words)
    assert damaged.name in out and "checkpoints/step-0000011, step 11 (" in out
