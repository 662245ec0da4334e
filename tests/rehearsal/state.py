"""The state of simulated GPUs: on which device each tensor is said to be, streams, events, and host
waits.

Every tensor is a real CPU tensor. Its storage has a tag, the device that the program believes it is
on. The vector clocks of `torch.cuda._sanitizer` find races between streams.
"""

import itertools
import traceback
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.cuda import _sanitizer
from torch.multiprocessing.reductions import StorageWeakRef

CPU = torch.device("cpu")
# The tag of a tensor that C++ made in a backward pass. It is compatible with every device.
ANY = torch.device("meta")
_MAX_TAGS = 20_000  # expired tags are removed above this number


class DeviceError(RuntimeError):
    """What CUDA would refuse, or a race between streams."""


class SimulatedGpus:
    """The state of one process.

    gpus: their number. waits: how often the host had to wait for a GPU, by operator and place.
    unpinned_copies: copies to a GPU from memory that is not pinned, by place.
    """

    def __init__(self, gpus: int = 1):
        self.gpus = gpus
        self.current_index = 0
        self.nccl_device: torch.device | None = None  # of the main group, if it is nccl's
        self.waits: Counter[str] = Counter()
        self.unpinned_copies: Counter[str] = Counter()
        self.python_calls = 0  # nested calls of torch functions from Python
        self.deterministic_cublas: bool | None = None  # decided when cuBLAS is used first
        self.generators = tuple(SimulatedGenerator(f"cuda:{index}") for index in range(gpus))
        self.clocks = _sanitizer.EventHandler()
        self.numbers = itertools.count(1)  # of streams and events
        self.default_streams = [
            SimulatedStream(torch.device("cuda", i), self, 0) for i in range(gpus)
        ]
        self.current_streams = list(self.default_streams)
        self._tags: dict[int, tuple[StorageWeakRef, torch.device]] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        # Storages that a stream other than the default one has used: the stream that allocated
        # them, and those for which `record_stream` was called.
        self._stream_storages: dict[int, tuple[StorageWeakRef, int, set[int]]] = {}

    def tag(self, tensor: Tensor) -> torch.device:
        """The device of a tensor's storage, or `ANY`."""
        entry = self._tags.get(_key(tensor))
        return CPU if entry is None else entry[1]

    def device(self, tensor: Tensor) -> torch.device:
        """The device that `tensor.device` returns to the program."""
        tag = self.tag(tensor)
        return torch.device("cuda", self.current_index) if tag == ANY else tag

    def set_tag(self, tensor: Tensor, device: torch.device) -> None:
        storage = tensor.untyped_storage()
        self._tags.pop(_key(tensor), None)
        if device != CPU:
            self._tags[_key(tensor)] = (StorageWeakRef(storage), device)
        if len(self._tags) > _MAX_TAGS:
            self._tags = {key: tag for key, tag in self._tags.items() if not tag[0].expired()}
            assert len(self._tags) < _MAX_TAGS, "too many live tensors"

    def resolve(self, device: Any) -> torch.device:
        """A device with an index. Raises DeviceError for a GPU that does not exist."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type != "cuda":
            return device
        index = self.current_index if device.index is None else device.index
        if index >= self.gpus:
            raise DeviceError(f"CUDA error: invalid device ordinal {index} of {self.gpus}")
        return torch.device("cuda", index)

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy in pinned memory. Also called in the thread of a DataLoader, where no mode is
        active.
        """
        if self.tag(tensor) != CPU:
            raise RuntimeError("only dense CPU tensors can be pinned")
        pinned = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).copy_(
            tensor
        )
        self._pinned[_key(pinned)] = StorageWeakRef(pinned.untyped_storage())
        if len(self._pinned) > 1000:
            self._pinned = {key: ref for key, ref in self._pinned.items() if not ref.expired()}
        return pinned

    def is_pinned(self, tensor: Tensor) -> bool:
        reference = self._pinned.get(_key(tensor))
        return reference is not None and not reference.expired()

    def count_wait(self, operator: str) -> None:
        self.waits[f"{operator} at {caller()}"] += 1

    def count_copy(self, tensor: Tensor, source: torch.device, target: torch.device) -> None:
        """Count a copy that the host waits for: to the CPU, or from memory that is not pinned."""
        if source.type == "cuda" and target == CPU:
            self.count_wait("copy to the host")
        elif source == CPU and target.type == "cuda" and not self.is_pinned(tensor):
            self.unpinned_copies[caller()] += 1

    def current_stream(self, device: Any = "cuda") -> "SimulatedStream":
        return self.current_streams[self.resolve("cuda" if device is None else device).index]

    def record_stream(self, tensor: Tensor, stream: "SimulatedStream") -> None:
        if _key(tensor) in self._stream_storages:
            self._stream_storages[_key(tensor)][2].add(stream.number)

    def launch(
        self, operator: str, device: torch.device, reads: list[Tensor], writes: list[Tensor]
    ) -> None:
        """Check a kernel on the current stream against what other streams did to its tensors.

        Raises DeviceError for memory of another stream that is not recorded, and for a race.
        """
        stream = self.current_stream(device)
        tensors = {_key(tensor): tensor for tensor in (*reads, *writes)}
        if stream.number == 0 and not any(key in self._stream_storages for key in tensors):
            return
        for key, tensor in tensors.items():
            entry = self._stream_storages.get(key)
            if entry is None or entry[0].expired():
                reference = StorageWeakRef(tensor.untyped_storage())
                self._stream_storages[key] = (reference, stream.number, {stream.number})
            elif stream.number not in entry[2]:
                raise DeviceError(
                    f"{operator}: memory of stream {entry[1]} is used on stream {stream.number} "
                    f"without record_stream"
                )
        written = {_key(tensor) for tensor in writes}
        names: dict[int, list[str]] = {key: [] for key in tensors}
        races: list[Any] = self.clocks._handle_kernel_launch(
            stream.number, set(tensors) - written, written, written, operator, names
        )
        if races:
            other = races[0].previous_access.stream
            raise DeviceError(f"{operator}: race between streams {other} and {stream.number}")


_state: SimulatedGpus | None = None


def activate(state: SimulatedGpus | None) -> None:
    """Make this the state of the process. It is set before its streams are made."""
    global _state
    _state = state


def current() -> SimulatedGpus:
    assert _state is not None, "no simulated GPU is active"
    return _state


def caller() -> str:
    """The nearest line of the package on the stack."""
    for frame in reversed(traceback.extract_stack()[:-1]):
        if "imagenet_cls/" in frame.filename:
            file = frame.filename.rpartition("imagenet_cls/")[2]
            return f"{file}:{frame.lineno} {frame.name}"
    return "outside of the package"


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class SimulatedStream:
    """In place of torch.cuda.Stream. The default stream of each GPU has the number 0."""

    def __init__(
        self,
        device: Any = None,
        state: SimulatedGpus | None = None,
        number: int | None = None,
        **_: Any,
    ):
        self.state = state or current()
        self.device = self.state.resolve(self.state.current_index if device is None else device)
        self.number = next(self.state.numbers) if number is None else number
        if number is None:
            self.state.clocks._handle_stream_creation(self.number)

    def record_event(self, event: "SimulatedEvent | None" = None) -> "SimulatedEvent":
        event = event or SimulatedEvent()
        self.state.clocks._handle_event_record(event.number, self.number)
        return event

    def wait_event(self, event: "SimulatedEvent") -> None:
        self.state.clocks._handle_event_wait(event.number, self.number)

    def wait_stream(self, stream: "SimulatedStream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.state.clocks._handle_stream_synchronization(self.number)

    def is_capturing(self) -> bool:
        return False


class SimulatedEvent:
    """In place of torch.cuda.Event."""

    def __init__(self, *_: Any, **__: Any):
        self.number = next(current().numbers)
        current().clocks._handle_event_creation(self.number)

    def record(self, stream: SimulatedStream | None = None) -> None:
        (stream or current().current_stream()).record_event(self)

    def wait(self, stream: SimulatedStream | None = None) -> None:
        (stream or current().current_stream()).wait_event(self)


class SimulatedGenerator(torch.Generator):
    """A CPU generator that says that it is on a GPU."""

    home: torch.device

    def __new__(cls, device: Any = "cpu") -> "SimulatedGenerator":
        generator = super().__new__(cls, "cpu")  # type: ignore[call-arg]  # torch.Generator has it
        generator.home = torch.device(device)
        return generator
