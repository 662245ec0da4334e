"""The checkpoint folder: what is written is read, damage is found, and a kill at any moment leaves
intact ones.
"""

import json
import os
import resource
import shutil
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from imagenet_cls.checkpoint.format import (
    Snapshot,
    list_checkpoints,
    prune,
    read_checkpoint,
    step_of,
    write_checkpoint,
    write_manifest,
)
from imagenet_cls.checkpoint.progress import Progress, read_progress
from imagenet_cls.checkpoint.select import checkpoints_in, load_best, newest_intact
from imagenet_cls.errors import CheckpointError, ResourceError

TENSORS = ("model.safetensors", "ema.safetensors", "optimizer.safetensors")
FILES = (*TENSORS, "optimizer.json", "state.json", "manifest.json")


def snapshot(step: int, value: float = 0.5, **best: dict[str, Any]) -> Snapshot:
    weights = {"conv.weight": torch.full((2, 3), value), "norm.counter": torch.tensor(step)}
    moments = {"conv.weight//exp_avg": torch.arange(6.0).view(2, 3)}
    return Snapshot(
        model=weights,
        ema={name: tensor + 1 for name, tensor in weights.items()},
        optimizer=moments | {"conv.weight//step": torch.tensor(3.0)},
        optimizer_values={"groups": [{"lr": 0.1, "betas": [0.9, 0.999]}], "parameters": {}},
        state={
            "step": step,
            "progress": asdict(Progress(step=step, best=best)),
            "classes": ["ärger", "b"],
            "config": {"z": 1, "a": 2},
            "note": value,
        },
    )


def plain(snapshot: Snapshot) -> list[Any]:
    """The content without tensors, to compare it."""
    groups = (snapshot.model, snapshot.optimizer, snapshot.ema or {})
    tensors = [{k: (v.dtype, v.tolist()) for k, v in group.items()} for group in groups]
    return [*tensors, snapshot.ema is None, snapshot.optimizer_values, snapshot.state]


def test_write_and_read_returns_the_same(tmp_path: Path) -> None:
    written = snapshot(1234)
    path = write_checkpoint(tmp_path / "checkpoints", written)
    assert path == tmp_path / "checkpoints" / "step-0001234"
    assert sorted(file.name for file in path.iterdir()) == sorted(FILES)
    assert [*path.parent.iterdir()] == [path]  # nothing temporary is left
    back = read_checkpoint(path)
    assert plain(back) == plain(written)
    assert back.path == path and list(back.state["config"]) == ["z", "a"]
    written.ema = None
    assert read_checkpoint(write_checkpoint(tmp_path, written)).ema is None


@pytest.mark.parametrize("name", FILES)
def test_read_flipped_bit_or_truncated_or_missing_file_is_an_error(
    tmp_path: Path, name: str
) -> None:
    path = write_checkpoint(tmp_path, snapshot(1))
    file = path / name
    whole = file.read_bytes()
    for position in range(0, len(whole), 23):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="step-0000001"):
            read_checkpoint(path)
    for length in (0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 2):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_checkpoint(path)
    file.write_bytes(whole)
    read_checkpoint(path)
    file.unlink()
    with pytest.raises(CheckpointError):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[]", "{}", "null", '{"progress": 1}', '{"format": 99}']
)
def test_read_malformed_state_is_an_error(tmp_path: Path, text: str) -> None:
    """With digests that match."""
    path = write_checkpoint(tmp_path, snapshot(1))
    (path / "state.json").write_text(text)
    write_manifest(path)
    with pytest.raises(CheckpointError):
        read_checkpoint(path)


def test_read_progress_returns_what_was_written() -> None:
    best = {"raw": {"step": 1, "loss": 0.5}}
    progress = Progress(1, 1, best, {"raw": {"top1_pct": 9.0, "loss": 0.5}}, [{"loss": 0.5}])
    assert read_progress(json.loads(json.dumps(asdict(progress)))) == progress
    assert read_progress({"step": 1, "evaluated_step": 0}) == Progress(1)  # of an older version
    assert read_progress(asdict(progress) | {"evaluations": [[1, 9.0]]}) == progress  # likewise
    with pytest.raises(TypeError):
        read_progress(asdict(progress) | {"steps": 1})


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "optimizer.json"])
def test_read_file_left_out_of_the_manifest_is_an_error(tmp_path: Path, file: str) -> None:
    path = write_checkpoint(tmp_path, snapshot(1))
    (path / file).unlink()
    write_manifest(path)
    with pytest.raises(CheckpointError, match=file.removesuffix(".safetensors")):
        read_checkpoint(path)


OUTSIDE = [("../step-0000001/state.json", ""), ("/dev/zero", ""), ("x", "/dev/zero")]


@pytest.mark.parametrize(("name", "target"), OUTSIDE)
def test_read_manifest_naming_other_files_is_an_error(
    tmp_path: Path, name: str, target: str
) -> None:
    """A folder from elsewhere must not make us read files outside of it, or an endless one."""
    path = write_checkpoint(tmp_path, snapshot(1))
    manifest = json.loads((path / "manifest.json").read_text())
    if target:
        (path / name).symlink_to(target)
    manifest["files"][name] = manifest["files"]["state.json"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=name):
        read_checkpoint(path)


def test_newest_intact_skips_and_names_damaged_ones(tmp_path: Path) -> None:
    assert newest_intact([]) == (None, [])
    for step in (1, 2, 10):
        write_checkpoint(tmp_path, snapshot(step))
    (tmp_path / "step-0000010" / "ema.safetensors").write_bytes(b"x")
    (tmp_path / "step-0000002" / "state.json").unlink()
    (tmp_path / "notes").mkdir()
    found, damage = newest_intact(checkpoints_in(tmp_path))
    assert found.state["step"] == 1
    assert "step-0000010" in damage[0] and "step-0000002" in damage[1]
    (tmp_path / "step-0000001" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="--overwrite"):
        newest_intact(checkpoints_in(tmp_path))


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 8):
        write_checkpoint(tmp_path, snapshot(step))
    prune(tmp_path, 7, None, set())
    assert len(list_checkpoints(tmp_path)) == 7
    prune(tmp_path, 7, 2, {3})
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [7, 6, 3]
    assert len(list(tmp_path.iterdir())) == 3
    # A later one is damaged, else the run would have resumed from it: it does not count.
    write_checkpoint(tmp_path, snapshot(9))
    prune(tmp_path, 7, 1, set())
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [9, 7]


def test_load_best_and_newest_intact_of_a_run_folder(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    best = {"raw": {"top1_pct": 70.0, "step": 1}, "ema": {"top1_pct": 80.0, "step": 2}}

    def found(named: Path) -> tuple[int, str | None, int]:
        chosen, kind, damage = load_best(named)
        return chosen.state["step"], kind, len(damage)

    write_checkpoint(folder, snapshot(1))
    assert found(tmp_path) == (1, None, 1)  # it says that there is no evaluation
    for step in (1, 2, 3):
        write_checkpoint(folder, snapshot(step, **best))
    for named in (tmp_path, folder):
        assert found(named) == (2, "ema", 0)
        assert newest_intact(checkpoints_in(named))[0].state["step"] == 3
    first = folder / "step-0000001"
    assert found(first) == (1, "ema", 0) and checkpoints_in(first) == [first]
    (folder / "step-0000002" / "model.safetensors").write_bytes(b"")
    assert found(tmp_path) == (3, None, 1)  # the best one is damaged: the newest
    shutil.rmtree(folder / "step-0000002")
    assert found(tmp_path) == (3, None, 1)  # it is missing
    (folder / "step-0000003" / "state.json").write_text("{}")
    assert found(tmp_path) == (1, None, 2)
    (first / "state.json").unlink()
    for name in ("", "nothing", "model.pt2"):
        with pytest.raises(CheckpointError):
            load_best(tmp_path / name)


ACCESSES = ["open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"]


def killed_at(moment: int, folder: Path, written: Snapshot) -> bool:
    """Write in a child that is killed before its n-th access to the file system; false where it
    ended before that.
    """
    child = os.fork()
    if child == 0:
        left = moment

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in ACCESSES:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count)
            write_checkpoint(folder, written)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("same_step", [True, False])
def test_write_killed_at_any_moment_leaves_intact_checkpoints(
    tmp_path: Path, same_step: bool
) -> None:
    """The only checkpoint is replaced by one of the same step, or followed by a newer one."""
    old = snapshot(5, value=0.25)
    new = snapshot(5 if same_step else 6, value=0.75)
    outcomes = set()
    for moment in range(1, 200):
        folder = tmp_path / str(moment)
        write_checkpoint(folder, old)
        was_killed = killed_at(moment, folder, new)
        found, damage = newest_intact(checkpoints_in(folder))
        assert damage == [], moment
        outcomes.add(found.state["note"])
        assert plain(found) == plain(new if found.state["note"] == 0.75 else old)
        # The next write succeeds, and removes what the kill left.
        write_checkpoint(folder, snapshot(7))
        names = {path.name for path in folder.iterdir()}
        assert "step-0000007" in names and names <= {
            "step-0000005",
            "step-0000006",
            "step-0000007",
        }, names
        assert all(read_checkpoint(path) for path in list_checkpoints(folder))
        if not was_killed:
            break
    assert not was_killed and moment > 15 and outcomes == {0.25, 0.75}


def test_write_failing_disk_leaves_older_checkpoints(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, snapshot(1))
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="step-0000002"):
        write_checkpoint(tmp_path / "file", snapshot(2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most_bytes in (100, 190, 300):  # in the weights, in the optimizer, in the manifest
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
        try:
            with pytest.raises(ResourceError, match=r"step-0000002.* bytes needed, .* free\)"):
                write_checkpoint(tmp_path, snapshot(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert plain(read_checkpoint(tmp_path / "step-0000001")) == plain(snapshot(1))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "step-0000001"]
