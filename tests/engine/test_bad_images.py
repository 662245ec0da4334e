"""Images and workers that fail in a run: named in a line, left out by the manifest, and the same bits for all that."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TRAIN, arguments, environment, losses, run, state_digest, train_here

from imagenet_cls.commands.program import main
from imagenet_cls.commands.train import train_command
from imagenet_cls.commands.verify_data import images_below, verify
from imagenet_cls.data.index import index_folder
from imagenet_cls.data.manifest import FILE_NAME
from imagenet_cls.data.shared_memory import check_shared_memory
from imagenet_cls.errors import ResourceError
from imagenet_cls.report.log import close_log

EXCLUDE = {"data__exclude": "${data.root}/" + FILE_NAME}


@pytest.fixture(autouse=True)
def log_closed() -> Iterator[None]:
    """A run's log belongs to its process; here many runs share one."""
    yield
    close_log()


@pytest.fixture
def folder(digits: Path, tmp_path: Path) -> Path:
    """train and val of 8 and 2 images for each of ten classes, as links. The training image 3/<fifth> is cut short."""
    for name in sorted(path.name for path in (digits / "train").iterdir()):
        images = sorted((digits / "train" / name).iterdir())
        for part, chosen in (("train", images[:8]), ("val", images[8:10])):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            for image in chosen:
                (tmp_path / "data" / part / name / image.name).symlink_to(image)
    replace_by(bad_image(tmp_path / "data"), bad_image(tmp_path / "data").read_bytes()[:300])
    return tmp_path / "data"


def bad_image(data: Path) -> Path:
    return sorted((data / "train" / "3").iterdir())[5]


def replace_by(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def words(data: Path, work_dir: Path, **changes: Any) -> list[str]:
    of_folder = {"data__name": "folder", "data__val": "val", "data__val_fraction": "null"}
    return arguments(data, work_dir, **of_folder, **{"train__global_batch_size": 16, "train__max_steps": 6} | changes)


def ended(capsys: pytest.CaptureFixture[str], given: list[str]) -> tuple[int, str]:
    """A run that fails: its exit code, and what it said."""
    capsys.readouterr()
    code = main(train_command, given)
    error = capsys.readouterr().err
    assert len(error.splitlines()) <= 3 and "Traceback" not in error
    return code, error


def write_manifest(data: Path) -> None:
    verify(data, images_below(data), data / FILE_NAME, 1, lambda verdict: None)


def test_a_bad_image_is_left_out_as_if_it_had_never_been_there(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, error = ended(capsys, words(folder, tmp_path / "error"))
    assert code == 3 and f"{bad_image(folder)} (image 29): damaged" in error and "data.exclude=" in error
    code, error = ended(capsys, words(folder, tmp_path / "none", **EXCLUDE))
    assert code == 3 and FILE_NAME in error and "tools/verify_data.py" in error
    write_manifest(folder)
    capsys.readouterr()
    train_here(words(folder, tmp_path / "excluded", **EXCLUDE))
    assert "1 of 80 training images left out" in capsys.readouterr().out
    with monkeypatch.context() as patch:  # on a file system that lists the other way round, and with data workers
        patch.setattr(os, "scandir", Backwards)
        train_here(words(folder, tmp_path / "workers", data__num_workers=2, **EXCLUDE))
    # the reference: the image deleted
    unknown = bad_image(folder)
    content = unknown.read_bytes()
    unknown.unlink()
    assert len(index_folder(folder / "train")) == 79
    train_here(words(folder, tmp_path / "deleted"))
    digest = state_digest(tmp_path / "deleted")
    assert state_digest(tmp_path / "excluded") == state_digest(tmp_path / "workers") == digest
    # a run may go on from either: the digest of the images is the same
    unknown.write_bytes(content)
    train_here([*words(folder, tmp_path / "deleted", train__max_steps=8, **EXCLUDE), "--resume"])
    assert len(losses(tmp_path / "deleted")) == 8


class Backwards:
    """os.scandir, with the entries in reverse of the order of their names."""

    def __init__(self, path: Any):
        with SCANDIR(path) as entries:
            self.entries = sorted(entries, key=lambda entry: os.fsencode(entry.name), reverse=True)

    def __enter__(self) -> "Iterator[os.DirEntry[Any]]":
        return iter(self.entries)

    def __exit__(self, *_: object) -> None: ...


SCANDIR = os.scandir


def test_a_bad_image_that_the_manifest_does_not_name(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_manifest(folder)
    other = sorted((folder / "train" / "7").iterdir())[0]
    replace_by(other, b"")
    code, error = ended(capsys, words(folder, tmp_path / "run", data__num_workers=2, **EXCLUDE))
    assert code == 3 and len(error.splitlines()) == 1
    assert f"{other} (image 55): an empty file" in error and "does not name it" in error


def test_validation_leaves_nothing_out(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = sorted((folder / "val" / "4").iterdir())[1]
    replace_by(broken, b"")
    write_manifest(folder)
    code, error = ended(capsys, words(folder, tmp_path / "run", **EXCLUDE))
    assert code == 3 and f"{broken} (image 9)" in error and "validation leaves no image out" in error
    (folder / FILE_NAME).unlink()
    bad_image(folder).unlink()
    code, error = ended(capsys, words(folder, tmp_path / "run"))  # found out when it is read
    assert code == 3 and f"{broken} (image 9): an empty file" in error and "validation leaves no image out" in error


def test_data_sets_without_files_have_none_to_leave_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, error = ended(capsys, arguments(tmp_path, tmp_path / "run", data__name="synthetic", data__exclude="m.json"))
    assert code == 2 and "data.exclude: " in error


# ------------------------------------------------------------------------------------------------ data workers


def children() -> set[str]:
    """Process ids of this process's children."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.parametrize("where", ["training", "evaluation"])
def test_a_worker_that_hangs_is_named_in_time(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    """Reading a pipe that nobody writes to never ends, as a network disk that is gone."""
    replace_by(bad_image(folder), b"")
    pipe = bad_image(folder) if where == "training" else sorted((folder / "val" / "0").iterdir())[0]
    pipe.unlink()
    os.mkfifo(pipe)
    if where == "evaluation":
        bad_image(folder).unlink()
    started, before = time.monotonic(), children()
    given = words(folder, tmp_path / "run", data__num_workers=2, data__timeout_sec=1.5)
    code, error = ended(capsys, given)
    index = 29 if where == "training" else 0
    assert code == 5 and "gave no batch for 1.5 s (data.timeout_sec)" in error
    assert f"{pipe.parent.name}/{pipe.name} (image {index})" in error and "data worker" in error
    assert time.monotonic() - started < 12
    assert children() <= before


class Faulty:
    """Raises what it was given at image 11; called as a data set's factory, by `faulty` below."""

    classes = ("a", "b")

    def __init__(self, error: Callable[[], Exception]):
        self.error = error

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if i == 11:
            raise self.error()
        return torch.full((3, 16, 16), i, dtype=torch.uint8), i % 2


def after(number: int) -> Exception:
    """What comes of a signal to this process itself."""
    os.kill(os.getpid(), number)
    return AssertionError("went on")


ERRORS: dict[str, Callable[[], Exception]] = {
    "key": lambda: KeyError("no such record"),
    "memory": lambda: OSError(28, "No space left on device"),
    "stopped": lambda: after(signal.SIGSTOP),
    "killed": lambda: after(signal.SIGKILL),
}


def faulty(root: str, part: str, error: str) -> Faulty:
    return Faulty(ERRORS[error])


def of_faulty(tmp_path: Path, error: str, **changes: Any) -> list[str]:
    own = {"data__name": "test_bad_images:faulty", "data__kwargs": f"{{error: {error}}}", "data__num_workers": 1}
    own |= {"data__val": "val", "data__val_fraction": "null", "train__global_batch_size": 16}
    return arguments(tmp_path, tmp_path / "run", **(own | changes))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("key", ["raised KeyError", "no such record", "--traceback"]),
        ("memory", ["raised OSError", "data.num_workers"]),
    ],
)
def test_a_worker_that_raises_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: str, expected: list[str]
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    code, said = ended(capsys, of_faulty(tmp_path, error))
    assert code == 5 and "data worker 0 (process " in said
    assert "test_bad_images:faulty/train[11] (image 11)" in said
    for text in expected:
        assert text in said
    log = (tmp_path / "run" / "logs" / "rank0.log").read_text()
    assert "in __getitem__" in log and "raise self.error()" in log


def test_a_worker_that_is_stopped_in_the_middle_of_a_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SIGSTOP, as a debugger or a suspended job does it."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    started, before = time.monotonic(), children()
    code, said = ended(capsys, of_faulty(tmp_path, "stopped", data__timeout_sec=1.5))
    assert code == 5 and "data worker 0 (process " in said and "gave no batch for 1.5 s (data.timeout_sec)" in said
    assert "test_bad_images:faulty/train[11] (image 11)" in said and "SIGSTOP" in said
    assert time.monotonic() - started < 12
    assert children() <= before


def test_a_worker_that_is_killed_ends_the_program(tmp_path: Path) -> None:
    """As the kernel kills where memory runs out. The program itself: all that it leaves behind would be seen."""
    path = os.pathsep.join([str(Path(__file__).parent), environment()["PYTHONPATH"]])
    given = of_faulty(tmp_path, "killed", data__num_workers=2, data__timeout_sec=20)
    ended = run([sys.executable, TRAIN, *given], timeout_sec=120, PYTHONPATH=path)
    assert ended.returncode == 5, ended.stderr
    said = ended.stderr.splitlines()
    assert len(said) == 2 and "a data worker of process " in said[0] and "was killed" in said[0]
    assert "memory or /dev/shm ran out" in said[1] and "data.num_workers" in said[1]


def test_too_little_shared_memory_is_said_before_the_first_batch(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad_image(folder).unlink()
    # The four batches of an epoch, of 16 images with 65,536 px a side.
    sides = {"augment__size_px": 65_536, "data__num_workers": 2, "data__prefetch_batches": 50}
    given = words(folder, tmp_path / "run", **sides)
    code, error = ended(capsys, given)
    assert code == 5 and "/dev/shm has" in error and "need 786,432 MiB" in error and "data.prefetch_batches" in error
    assert not list((tmp_path / "run").rglob("metrics.jsonl"))


def test_a_shared_memory_that_is_small_in_truth() -> None:
    """/dev/shm of 4 MiB in a mount namespace of a process's own, as a container has it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if mounted(b"/dev/shm", b"size=4m"):
                check_shared_memory([(5, 512)], 1)
                check_shared_memory([(4, 512), (1, 1024)], 1)
        except ResourceError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    said = os.read(reading, 1000).decode()
    os.close(reading)
    if not said:
        pytest.skip("needs a mount namespace (root)")
    assert said.startswith("/dev/shm has 4 MiB free, and the batches that data workers hold ready there need 6 MiB\n")


def mounted(place: bytes, options: bytes) -> bool:
    """A tmpfs that only this process sees; whether it is there."""
    new_namespace, private = 0x20000, (1 << 14) | (1 << 18)  # CLONE_NEWNS; MS_REC, MS_PRIVATE
    libc = ctypes.CDLL(None)
    return (
        libc.unshare(new_namespace) == 0
        and libc.mount(b"none", b"/", None, ctypes.c_ulong(private), None) == 0
        and libc.mount(b"tmpfs", place, b"tmpfs", ctypes.c_ulong(0), options) == 0
    )


def test_the_estimate_of_shared_memory(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    fits = free // (3 * 1000 * 1000) // 4
    check_shared_memory([(fits, 1000), (fits, 1000)], 1, tmp_path)
    with pytest.raises(ResourceError, match="MiB"):
        check_shared_memory([(fits, 1000), (fits, 1000)], 8, tmp_path)
    check_shared_memory([(10**9, 1000)], 8, tmp_path / "no_such_folder")  # no Linux
