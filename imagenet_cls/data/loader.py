"""Batches of training and evaluation images: uint8, on the CPU, the same bits for any number of workers."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

from imagenet_cls.data import workers
from imagenet_cls.data.samplers import EpochSampler, SampleKey
from imagenet_cls.data.sources import ImageSource
from imagenet_cls.data.transforms import TrainTransform, Transform, View
from imagenet_cls.errors import UserError
from imagenet_cls.seeding import hash_key, preserve_rng_state, seed_generators


class TrainBatch(NamedTuple):
    """B images in V views each (`augment.splits`), view-major: `images.split(B)` are the views, as in timm's AugMix.

    images: uint8 (B * V, 3, S, S). targets: int64 (B,). With random erasing, boxes: int32 (B * V, n, 4) of top, left,
    height, width, zeros where none; and keys: int64 (B * V,), which the fill colours are drawn from. Both are always on
    the CPU, and None without erasing.
    """

    images: torch.Tensor
    targets: torch.Tensor
    boxes: torch.Tensor | None = None
    keys: torch.Tensor | None = None


class TrainLoader:
    """Micro-batches of this rank, epoch by epoch. Workers stay alive between epochs, until `close`.

    micro_batch_size: divides this rank's share of the global batch. prefetch_batches: batches that each worker prepares
    ahead. pin_memory: copy batches into page-locked memory, for asynchronous transfers to a GPU. num_workers: with 0,
    samples are made in this process, and torch's, numpy's and Python's default generators keep their states.
    timeout_sec: the longest wait for a worker.
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
        """Batches from `start_step` on, in order. The image size may differ between epochs.

        An unfinished iterator is invalid after the next call or `close`. Raises DataError for an image that cannot be
        read, and ResourceError for a worker that was killed, raised anything else, or took longer than `timeout_sec`.
        """
        self.started += 1
        token = self.started
        self.sampler.set_epoch(epoch, start_step)
        for batch in _batches(self.loader):
            yield TrainBatch(*batch)
            assert token == self.started, "this iterator is invalid: a newer epoch was started, or the loader closed"

    def close(self) -> None:
        """Stop the workers. May be called again; a later epoch starts new workers."""
        self.started += 1
        workers.stop_workers(self.loader)


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

    Every image of `indices` once, in order; the last batch may be smaller. The workers end with the iterator. Errors
    as in `TrainLoader.epoch`.
    """
    samples = _EvalSamples(source, transform)
    num_workers = min(num_workers, len(indices))
    loader = _data_loader(samples, indices, batch_size, num_workers, prefetch_batches, pin_memory, timeout_sec)
    try:
        yield from _batches(loader)
    finally:
        workers.stop_workers(loader)


class _Samples:
    """The DataLoader's data set: makes whole batches, in a worker or in the main process.

    reading: int64 (workers,) in shared memory: the image that each worker reads; -1 before its first.
    """

    def __init__(self, source: ImageSource):
        self.source = source
        self.reading = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, keys: list[Any]) -> Any:
        """The batch for these keys, as a tuple of tensors; or the error of its first image that has one.

        The error is returned, not raised: torch would wrap it in another one.
        """
        worker = get_worker_info()
        with nullcontext() if worker is not None else preserve_rng_state():
            try:
                return self.batch(keys)
            except UserError as error:
                return error
            except Exception as error:
                if worker is None:
                    raise
                return workers.worker_raised(error, worker.id, self.image_of(worker.id))

    def batch(self, keys: list[Any]) -> tuple[Any, ...]:
        raise NotImplementedError

    def load(self, key: int, index: int) -> tuple[torch.Tensor, int]:
        """An image and its target, with all default generators seeded by `key` beforehand."""
        worker = get_worker_info()
        if worker is not None:
            self.reading[worker.id] = index
        seed_generators(key)
        return self.source.load(index)

    def image_of(self, worker_id: int) -> str:
        """Name and index of the image that a worker reads."""
        index = int(self.reading[worker_id])
        return f"{self.source.name(index)} (image {index})" if index >= 0 else "no image yet"


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
            # in a worker, default_collate writes straight into shared memory
            images=default_collate([view.image for view, _ in by_split]),
            targets=torch.tensor([target for _, _, target in samples]),
            boxes=torch.stack(boxes) if boxes else None,
            keys=torch.tensor([key for _, key in by_split]) if boxes else None,
        )

    def sample(self, epoch: int, index: int, view: int) -> tuple[list[View], list[int], int]:
        """The splits' views, their keys, and the target."""
        first = view * self.transform.splits
        numbers = range(first, first + self.transform.splits)
        split_keys = [hash_key("sample", self.seed, epoch, index, number) for number in numbers]
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
        # The transform draws nothing; a user's data set may draw, and draws the same each time.
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
    worker_options: dict[str, Any] = {}
    if num_workers > 0:
        samples.reading = torch.full((num_workers,), -1).share_memory_()
        worker_options = {
            "timeout": timeout_sec,
            "multiprocessing_context": workers.START_METHOD,
            "persistent_workers": True,
            "prefetch_factor": prefetch_batches,
            "worker_init_fn": workers.start_worker,
        }
    return DataLoader(
        samples,  # type: ignore[arg-type]
        batch_size=batch_size,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=_identity,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # otherwise each epoch draws a number from torch's default generator
        **worker_options,
    )


def _identity(batch: Any) -> Any:
    return batch


def _batches(loader: DataLoader[Any]) -> Iterator[Any]:
    """The loader's batches. Raises the errors that `_Samples` returns, and ResourceError for workers that fail."""
    for batch in iter(loader) if loader.num_workers == 0 else _worker_batches(loader):
        if isinstance(batch, UserError):
            raise batch
        yield tuple(batch)  # pinning makes a list of it


def _worker_batches(loader: DataLoader[Any]) -> Iterator[Any]:
    iterator: Iterator[Any] | None = None
    while True:
        with workers.time_limit(loader) as expired:
            try:
                if iterator is None:
                    iterator = iter(loader)
                    workers.kill_workers_at_exit()
                batch = next(iterator, None)
            except (OSError, EOFError, RuntimeError) as error:
                raise _worker_error(loader, error, expired.is_set()) from None
        if batch is None:
            return
        yield batch


def _worker_error(loader: DataLoader[Any], error: Exception, expired: bool) -> Exception:
    """What to raise for `error`, which came up while a batch was awaited. Stops the workers where one failed."""
    samples: Any = loader.dataset
    if expired or "DataLoader timed out" in str(error):
        worker_id, pid = workers.awaited_worker(loader)
        workers.stop_workers(loader)
        return workers.worker_hung(worker_id, pid, loader.timeout, samples.image_of(worker_id))
    if isinstance(error, ConnectionError | EOFError):  # the worker died while it sent a batch
        workers.stop_workers(loader)  # before torch's SIGCHLD handler raises as well
        return workers.worker_killed(f"{type(error).__name__}: {error}")
    return (workers.worker_death(error) if isinstance(error, RuntimeError) else None) or error
