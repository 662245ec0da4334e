"""Checkpoints: what comes back, what is noticed, and what a kill at any moment leaves."""

import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from imagenet_cls.checkpoint.format import (
    Snapshot,
    _canonical,
    _digest,
    _manifest,
    _write_json,
    checkpoint_path,
    list_checkpoints,
    prune,
    read_checkpoint,
    step_of,
    write_checkpoint,
)
from imagenet_cls.checkpoint.optimizer_state import Progress
from imagenet_cls.checkpoint.select import load_best, load_newest, load_newest_in
from imagenet_cls.errors import CheckpointError, ResourceError

FILES = (
    "model.safetensors",
    "ema.safetensors",
    "optimizer.safetensors",
    "optimizer.json",
    "state.json",
    "manifest.json",
)


def snapshot(step: int, value: float = 0.5, **best: dict[str, Any]) -> Snapshot:
    weights = {"conv.weight": torch.full((2, 3), value), "norm.num_batches_tracked": torch.tensor(step)}
    return Snapshot(
        model=weights,
        ema={name: tensor + 1 for name, tensor in weights.items()},
        optimizer={
            "conv.weight//momentum_buffer": torch.arange(6.0).view(2, 3),
            "conv.weight//step": torch.tensor(3.0),
        },
        optimizer_numbers={"groups": [{"lr": 0.1, "betas": [0.9, 0.999]}], "parameters": {}, "on_host": []},
        state={
            "step": step,
            "progress": Progress(step=step, best=best).to_dict(),
            "num_classes": 2,
            "classes": ["ärger", "b"],
            "data_digest": "",
            "plan": {"steps_per_epoch": 11},
            "world_size": 1,
            "cpu_threads": 1,
            "versions": {},
            "config": {},
            "scaler": {},
            "preprocessing": {"mean": [0.5], "std": [0.5]},
            "note": value,
        },
    )


def assert_same(a: Snapshot, b: Snapshot) -> None:
    for left, right in ((a.model, b.model), (a.ema, b.ema), (a.optimizer, b.optimizer)):
        assert (left is None) == (right is None)
        assert (left or {}).keys() == (right or {}).keys()
        for name, tensor in (left or {}).items():
            assert (right or {})[name].dtype == tensor.dtype and torch.equal((right or {})[name], tensor), name
    assert a.optimizer_numbers == b.optimizer_numbers
    assert a.state == b.state


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    written = snapshot(1234)
    path = write_checkpoint(tmp_path / "checkpoints", written)
    assert path == tmp_path / "checkpoints" / "step-0001234" == checkpoint_path(tmp_path / "checkpoints", 1234)
    assert sorted(file.name for file in path.iterdir()) == sorted(FILES)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]  # nothing temporary is left
    back = read_checkpoint(path)
    assert_same(back, written)
    assert back.path == path
    written.ema = None
    assert read_checkpoint(write_checkpoint(tmp_path, written)).ema is None


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_and_every_truncation_is_noticed(tmp_path: Path, name: str) -> None:
    path = write_checkpoint(tmp_path, snapshot(1))
    file = path / name
    whole = file.read_bytes()
    for position in range(len(whole)):
        for bit in (position % 8, (position + 5) % 8):  # two in each byte, and all eight over eight bytes
            file.write_bytes(whole[:position] + bytes([whole[position] ^ (1 << bit)]) + whole[position + 1 :])
            with pytest.raises(CheckpointError, match="step-0000001"):
                read_checkpoint(path)
    for length in {0, 1, 7, 8, 9, *range(0, len(whole) - 1, 37), len(whole) - 2}:
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_checkpoint(path)
    file.write_bytes(whole)
    read_checkpoint(path)
    file.unlink()
    with pytest.raises(CheckpointError):
        read_checkpoint(path)


def test_a_damaged_one_is_named_and_an_older_one_is_used(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "none") == (None, [])
    for step in (1, 2, 10):
        write_checkpoint(tmp_path, snapshot(step))
    (tmp_path / "step-0000010" / "ema.safetensors").write_bytes(b"x")
    (tmp_path / "step-0000002" / "state.json").unlink()
    (tmp_path / "notes").mkdir()
    found, damage = load_newest(tmp_path)
    assert found is not None and found.state["step"] == 1
    assert [("step-0000010" in damage[0], "ema.safetensors" in damage[0]), ("step-0000002" in damage[1], True)] == [
        (True, True), (True, True),
    ]  # fmt: skip
    (tmp_path / "step-0000001" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="none of 3 checkpoints is whole") as error:
        load_newest(tmp_path)
    assert "--overwrite" in str(error.value) and str(error.value).count("\n") < 3


def test_another_format_is_refused(tmp_path: Path) -> None:
    """Whole, so that its digests fit, but of another time."""
    foreign = snapshot(1)
    foreign.state["format"] = 99
    with pytest.raises(CheckpointError, match="another format"):
        read_checkpoint(write_checkpoint(tmp_path, foreign))


def test_what_a_manifest_names_lies_in_the_folder_and_is_a_file(tmp_path: Path) -> None:
    """A folder that came from elsewhere must not make us read another's files, or one without an end."""
    path = write_checkpoint(tmp_path, snapshot(1))
    listed = json.loads((path / "manifest.json").read_text())["files"]
    for name, place in (("../step-0000001/state.json", None), ("/dev/zero", None), ("endless", "/dev/zero")):
        if place is not None:
            (path / name).symlink_to(place)
        files = listed | {name: listed["state.json"]}
        (path / "manifest.json").write_text(json.dumps({"files": files, "sha256": _digest(_canonical(files))}))
        with pytest.raises(CheckpointError, match=f"not a whole checkpoint .no file '{name}'"):
            read_checkpoint(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{}", "null", '{"progress": 1}'])
def test_a_state_that_is_none_is_an_error_in_words(tmp_path: Path, text: str) -> None:
    path = write_checkpoint(tmp_path, snapshot(1))
    (path / "state.json").write_text(text)
    (path / "manifest.json").unlink()
    _write_json(path / "manifest.json", _manifest(path))
    with pytest.raises(CheckpointError, match=r"can't be read|written in another format"):
        read_checkpoint(path)


FORGED = {
    "state.json": [("classes", None), ("num_classes", "10"), ("world_size", True), ("preprocessing", {"mean": 1}),
                   ("progress", {"step": "x"}), ("config", []), ("versions", 1), ("step", None)],
    "optimizer.json": [("groups", {}), ("on_host", None), ("parameters", [])],
}  # fmt: skip


@pytest.mark.parametrize(("file", "name", "value"), [(file, *case) for file, cases in FORGED.items() for case in cases])
def test_what_is_missing_or_of_another_type_is_named(tmp_path: Path, file: str, name: str, value: object) -> None:
    """With digests that fit: nobody who reads a checkpoint meets a surprise later. None: the name is left out."""
    path = write_checkpoint(tmp_path, snapshot(1))
    content = json.loads((path / file).read_text())
    content[name] = value
    (path / file).write_text(json.dumps({key: item for key, item in content.items() if item is not None}))
    (path / "manifest.json").unlink()
    _write_json(path / "manifest.json", _manifest(path))
    with pytest.raises(CheckpointError, match=f"can't be read: {file}: {name}") as told:
        read_checkpoint(path)
    assert str(told.value).count("\n") == 1


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "optimizer.json"])
def test_a_file_that_is_left_out_is_named(tmp_path: Path, file: str) -> None:
    path = write_checkpoint(tmp_path, snapshot(1))
    for gone in (file, "manifest.json"):
        (path / gone).unlink()
    _write_json(path / "manifest.json", _manifest(path))
    with pytest.raises(CheckpointError, match=f"can't be read: '{file}' is missing"):
        read_checkpoint(path)


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 8):
        write_checkpoint(tmp_path, snapshot(step))
    prune(tmp_path, 7, None, set())
    assert len(list_checkpoints(tmp_path)) == 7
    prune(tmp_path, 7, 2, {3})
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [7, 6, 3]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_damaged_newer_checkpoint_does_not_push_out_those_written_after_it(tmp_path: Path) -> None:
    """Step 9 was damaged, so the run went on from step 4: what it saves from there must stay."""
    for step in (4, 9):
        write_checkpoint(tmp_path, snapshot(step))
    (tmp_path / "step-0000009" / "model.safetensors").write_bytes(b"")
    write_checkpoint(tmp_path, snapshot(5))
    prune(tmp_path, 5, 1, set())
    found, damage = load_newest(tmp_path)
    assert found is not None and found.state["step"] == 5 and len(damage) == 1


def test_a_run_folder_means_its_best_for_use_and_its_newest_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    best = {"raw": {"top1_pct": 70.0, "step": 1}, "ema": {"top1_pct": 80.0, "step": 2}}
    for step in (1, 2, 3):
        write_checkpoint(folder, snapshot(step, **best))

    def found(named: Path) -> tuple[int, str | None, int]:
        chosen, kind, damage = load_best(named)
        return chosen.state["step"], kind, len(damage)

    for named in (tmp_path, folder):
        assert found(named) == (2, "ema", 0)
        assert load_newest_in(named)[0].state["step"] == 3
    assert found(folder / "step-0000001") == (1, None, 0)
    assert load_newest_in(folder / "step-0000001")[0].state["step"] == 1
    (folder / "step-0000003" / "state.json").write_text("{}")  # the newest tells nothing: the next one does
    assert found(tmp_path) == (2, "ema", 1)
    assert load_newest_in(tmp_path)[0].state["step"] == 2
    shutil.rmtree(folder / "step-0000002")
    assert found(tmp_path) == (1, None, 1)  # the best is gone: the newest whole
    (folder / "step-0000001" / "state.json").unlink()
    with pytest.raises(CheckpointError, match="none of 2"):
        load_best(tmp_path)
    with pytest.raises(CheckpointError, match="neither a checkpoint"):
        load_best(tmp_path / "nothing")


def test_a_damaged_best_is_passed_over_and_named(tmp_path: Path) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path, snapshot(step, raw={"top1_pct": 70.0, "step": 1}))
    (tmp_path / "step-0000001" / "model.safetensors").write_bytes(b"")
    chosen, kind, damage = load_best(tmp_path)
    assert (chosen.state["step"], kind, len(damage)) == (2, None, 1)
    assert "step-0000001" in damage[0]


def killed_at(moment: int, folder: Path, written: Snapshot) -> bool:
    """Write in a child that is killed before its n-th access to the file system; whether it was, or got to the end."""
    child = os.fork()
    if child == 0:
        left = moment

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"):
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
def test_a_kill_at_any_moment_leaves_whole_checkpoints_only(tmp_path: Path, same_step: bool) -> None:
    """The only checkpoint there is, replaced by one of the same step or followed by a newer one."""
    old = snapshot(5, value=0.25)
    new = snapshot(5 if same_step else 6, value=0.75)
    outcomes = set()
    for moment in range(1, 200):
        folder = tmp_path / str(moment)
        write_checkpoint(folder, old)
        was_killed = killed_at(moment, folder, new)
        found, damage = load_newest(folder)
        assert found is not None and damage == [], moment
        outcomes.add(found.state["note"])
        assert_same(found, new if found.state["note"] == 0.75 else old)
        # The next write finds its way through whatever was left, and leaves nothing of it.
        write_checkpoint(folder, snapshot(7))
        names = {path.name for path in folder.iterdir()}
        assert "step-0000007" in names and names <= {"step-0000005", "step-0000006", "step-0000007"}, names
        assert all(read_checkpoint(path) for path in list_checkpoints(folder))
        if not was_killed:
            break
    assert not was_killed and moment > 15 and outcomes == {0.25, 0.75}


def test_a_disk_that_refuses_leaves_what_was_there(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, snapshot(1))
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="could not write"):
        write_checkpoint(tmp_path / "file", snapshot(2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most_bytes in (100, 190, 400):  # in the weights, in the optimizer, in the manifest: as on a disk that fills up
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
        try:
            with pytest.raises(ResourceError, match="could not write"):
                write_checkpoint(tmp_path, snapshot(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert_same(read_checkpoint(tmp_path / "step-0000001"), snapshot(1))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "step-0000001"]
