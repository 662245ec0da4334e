"""Batches of training and evaluation images, the same bits for any number of workers.

Owns how a worker makes a batch, the seeding of each sample, and how a broken image surfaces. Refuses floats and
devices: batches are uint8 on the CPU (`device` takes them from there). How workers begin and end is in `workers`; what
an end means to a user, in `worker_errors`. Called by `engine`'s training loop and evaluation.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

from imagenet_cls.data import workers
from imagenet_cls.data.samplers import EpochSampler, SampleKey
from imagenet_cls.data.sources import ImageSource
from imagenet_cls.data.transforms import TrainTransform, Transform, View
from imagenet_cls.data.worker_errors import TIMED_OUT, worker_death, worker_killed, worker_raised, worker_silent
from imagenet_cls.errors import ResourceError, UserError
from imagenet_cls.seeding import generators_left_alone, hash_key, seed_generators


class TrainBatch(NamedTuple):
    """B images in V views each (`augment.splits`), view-major: first the first views of all, then the second views, so
    that `images.split(B)` are the views, as in the collation of timm's AugMix training.

    images: uint8 (B * V, 3, S, S). targets: int64 (B,). With random erasing also boxes: int32 (B * V, n, 4) of top,
    left, height, width, zeros where none; and keys: int64 (B * V,), from which the colours to fill in are drawn. Both
    on the CPU always, and None without erasing.
    """

    images: torch.Tensor
    targets: torch.Tensor
    boxes: torch.Tensor | None = None
    keys: torch.Tensor | None = None


class TrainLoader:
    """Micro-batches of this rank, epoch by epoch. Workers stay alive between epochs, until `close`.

    micro_batch_size: images in one batch; divides this rank's share of the global batch. prefetch_batches: batches
    that each worker prepares ahead. pin_memory: copy batches into page-locked memory, for asynchronous transfers to a
    GPU. num_workers: 0 makes the samples in this process; torch's, numpy's and Python's default generators stay as
    they were. timeout_sec: longest wait for a worker.
    """

    def __init__(
        self,
        source: ImageSource,
        transform: TrainTransform,
        sampler: EpochSampler,
        micro_batch_size: int,
        seed: int,
        num_workers: int,
        prefetch_batches: int = 2,
        pin_memory: bool = False,
        timeout_sec: float = 300.0,
    ):
        share = sampler.global_batch_size // sampler.world_size
        assert share % micro_batch_size == 0, (share, micro_batch_size)
        self.sampler = sampler
        samples = _TrainSamples(source, transform, seed)
        self.loader = _data_loader(
            samples, sampler, micro_batch_size, num_workers, prefetch_batches, pin_memory, timeout_sec
        )
        self.started = 0

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[TrainBatch]:
        """Batches from `start_step` on, in order; their side may differ from epoch to epoch.

        An iterator may be left half way; the next call begins anew, and the older iterator must not be used again.
        Raises DataError for an image that cannot be read, and ResourceError where a worker was killed, raised anything
        else, or gave nothing for `timeout_sec`.
        """
        self.started += 1
        token = self.started
        self.sampler.set_epoch(epoch, start_step)
        for batch in _batches(self.loader):
            yield TrainBatch(*batch)
            assert token == self.started, "an older epoch was used after a newer one was begun, or after close"

    def close(self) -> None:
        """Stop the workers. Can be called more than once; an epoch begun afterwards starts new workers."""
        self.started += 1
        workers.stop(self.loader)


def eval_batches(
    source: ImageSource,
    transform: Transform,
    indices: Sequence[int],
    batch_size: int,
    num_workers: int,
    prefetch_batches: int = 2,
    pin_memory: bool = False,
    timeout_sec: float = 300.0,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Batches for evaluation: images uint8 (B, 3, S, S), targets int64 (B,), indices int64 (B,).

    Every image of `indices` once, in order; the last batch is smaller where they do not divide. The workers end with
    the iterator. Errors as in `TrainLoader.epoch`.
    """
    samples = _EvalSamples(source, transform)
    num_workers = min(num_workers, len(indices))
    loader = _data_loader(samples, indices, batch_size, num_workers, prefetch_batches, pin_memory, timeout_sec)
    try:
        yield from _batches(loader)
    finally:
        workers.stop(loader)


class _Samples:
    """Makes one batch: what a worker runs. An error is handed over as the batch: torch would wrap a raised one.

    reading: shared int64 (workers,), the image that each worker is at; -1 before its first.
    """

    def __init__(self, source: ImageSource):
        self.source = source
        self.reading = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, keys: list[Any]) -> Any:
        """The batch for these keys, as a tuple of tensors; or the error of its first image that has one."""
        worker = get_worker_info()
        with nullcontext() if worker is not None else generators_left_alone():
            try:
                return self.batch(keys)
            except UserError as error:
                return error
            except Exception as error:
                if worker is None:
                    raise
                return worker_raised(error, worker.id, self.at(worker.id))

    def batch(self, keys: list[Any]) -> tuple[Any, ...]:
        raise NotImplementedError

    def load(self, key: int, index: int) -> tuple[torch.Tensor, int]:
        """An image and its target, with every default generator seeded by `key` beforehand."""
        worker = get_worker_info()
        if worker is not None:
            self.reading[worker.id] = index
        seed_generators(key)
        return self.source.load(index)

    def at(self, worker_id: int) -> str:
        """Name and index of the image that a worker is at."""
        index = int(self.reading[worker_id])
        return f"{self.source.name(index)} (image {index})" if index >= 0 else "its start"


class _TrainSamples(_Samples):
    """Split s of V of sample (epoch, index, view) is drawn from the key (seed, epoch, index, view * V + s)."""

    def __init__(self, source: ImageSource, transform: TrainTransform, seed: int):
        super().__init__(source)
        self.transform = transform
        self.seed = seed

    def batch(self, keys: list[SampleKey]) -> TrainBatch:
        samples = [self.sample(*key) for key in keys]
        by_split = [(views[s], split_keys[s]) for s in range(self.transform.splits) for views, split_keys, _ in samples]
        boxes = [view.boxes for view, _ in by_split if view.boxes is not None]
        return TrainBatch(
            # default_collate writes straight into shared memory when in a worker
            images=default_collate([view.image for view, _ in by_split]),
            targets=torch.tensor([target for _, _, target in samples]),
            boxes=torch.stack(boxes) if boxes else None,
            keys=torch.tensor([key for _, key in by_split]) if boxes else None,
        )

    def sample(self, epoch: int, index: int, view: int) -> tuple[list[View], list[int], int]:
        """The splits' views, their keys, and the target."""
        first = view * self.transform.splits
        places = range(first, first + self.transform.splits)
        split_keys = [hash_key("sample", self.seed, epoch, index, place) for place in places]
        image, target = self.load(split_keys[0], index)
        return self.transform.views(image, epoch, split_keys), split_keys, target


class _EvalSamples(_Samples):
    def __init__(self, source: ImageSource, transform: Transform):
        super().__init__(source)
        self.transform = transform

    def batch(self, keys: list[int]) -> tuple[torch.Tensor, ...]:
        samples = [self.sample(index) for index in keys]
        images = default_collate([image for image, _ in samples])
        return images, torch.tensor([target for _, target in samples]), torch.tensor(keys)

    def sample(self, index: int) -> tuple[torch.Tensor, int]:
        # Nothing of ours draws in evaluation; a user's data set may, and then draws the same each time.
        image, target = self.load(hash_key("eval", index), index)
        return self.transform(image), target


def _data_loader(
    samples: _Samples,
    sampler: Any,
    batch_size: int,
    num_workers: int,
    prefetch_batches: int,
    pin_memory: bool,
    timeout_sec: float,
) -> DataLoader[Any]:
    of_workers: dict[str, Any] = {}
    if num_workers > 0:
        samples.reading = torch.full((num_workers,), -1).share_memory_()
        of_workers = {
            "timeout": timeout_sec,
            "multiprocessing_context": workers.START_METHOD,
            "persistent_workers": True,
            "prefetch_factor": prefetch_batches,
            "worker_init_fn": workers.begin,
        }
    loader: DataLoader[Any] = DataLoader(
        samples,  # type: ignore[arg-type]
        batch_size=batch_size,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # or each epoch would draw a number from torch's default generator
        **of_workers,
    )
    workers.end_at_exit(loader)
    return loader


def _as_it_is(batch: Any) -> Any:
    return batch


def _batches(loader: DataLoader[Any]) -> Iterator[Any]:
    """The loader's batches; errors that workers handed over are raised, and a worker's death is put in words."""
    with workers.Watch(loader, lambda: _silent(loader)) as watch:
        try:
            for batch in watch.batches():
                if isinstance(batch, UserError):
                    raise batch
                yield tuple(batch)  # pinning makes a list of it
        except (OSError, EOFError, RuntimeError) as error:
            if watch.error is not None or TIMED_OUT in str(error):
                told = watch.error or _silent(loader)
                workers.stop(loader, kill=True)  # they do not end by themselves
                raise told from None
            if isinstance(error, ConnectionError | EOFError):  # the worker died while it handed over a batch
                with suppress(RuntimeError):
                    time.sleep(1.0)  # torch's signal handler will raise as well, once, wherever we are: let it be here
                raise worker_killed(f"{type(error).__name__}: {error}") from None
            raise (worker_death(error) if isinstance(error, RuntimeError) else None) or error from None


def _silent(loader: DataLoader[Any]) -> ResourceError:
    """Name the worker that gives no batch."""
    samples: Any = loader.dataset
    worker_id = workers.suspect(loader)
    pid = workers.process_id(loader, worker_id)
    return worker_silent(worker_id, pid, loader.timeout, samples.at(worker_id), workers.is_stopped(pid))
