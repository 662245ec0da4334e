"""Implementations of `tools/benchmark.py`: each is a process of its own, in the Python and with the
packages it needs.

    python benchmarks/implementations.py '{"name": "timm", "folder": ..., "batch_size": 64,
    "workers": 2}'

prints its versions as a line of JSON, makes one pass to warm up, and then one for each line on
stdin, after which it prints images, wall-clock seconds and CPU seconds. Nothing here imports the
rest of `benchmarks`, or a package that another implementation needs.

Workers live on from pass to pass where the library allows it.
"""

import ctypes
import inspect
import io
import json
import math
import multiprocessing
import os
import platform
import random
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import distributions
from itertools import chain
from pathlib import Path
from typing import Any

Pass = Callable[[], int]  # one pass over the images; returns their number
PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "numpy",
    "pillow",
    "ffcv",
    "turbojpeg",
    "nvidia-dali",
    "nvidia-nvimgcodec",
)
SIZE_PX, RESIZE_PX = 224, 256
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def train_files(folder: str) -> list[str]:
    return sorted(str(path) for path in Path(folder, "train").glob("*/*"))


class SteadyPasses:
    """Passes over batches without end, whose workers read ahead.

    What they have ready at the start of a pass does not count. Between passes they are stopped, so
    that they take no time from the other implementations.
    """

    def __init__(self, batches: Iterator[Any], count: int, ready: int):
        """count: batches of a pass. ready: the most batches that the workers have ready."""
        self.batches, self.count, self.ready = batches, count, ready

    def prepare(self) -> None:
        self.signal_workers(signal.SIGCONT)
        for _ in range(self.ready):
            next(self.batches)

    def __call__(self) -> int:
        images = sum(len(next(self.batches)[0]) for _ in range(self.count))
        self.signal_workers(signal.SIGSTOP)
        return images

    @staticmethod
    def signal_workers(number: int) -> None:
        for worker in multiprocessing.active_children():
            os.kill(worker.pid or 0, number)


def passes_over(batches: Iterable[Any]) -> Pass:
    """Passes over a loader of (images, ...)."""
    return lambda: sum(len(batch[0]) for batch in batches)


def ours(
    folder: str,
    batch_size: int,
    workers: int,
    evaluate: bool = False,
    floats: bool = False,
    overrides: Iterable[str] = (),
) -> Pass:
    """This project's loader, as a run builds it: uint8 batches; with floats, also cast and
    normalized on the CPU.
    """
    import torch

    from imagenet_cls.config.load import load_config
    from imagenet_cls.data.datasets import open_datasets
    from imagenet_cls.data.device import Normalize
    from imagenet_cls.data.loader import PREFETCH_BATCHES
    from imagenet_cls.engine.loaders import build_train_loader, build_val_batches
    from imagenet_cls.engine.plan import plan_run
    from imagenet_cls.parallel.environment import RankInfo
    from imagenet_cls.parallel.process_group import RankContext

    options = [
        f"data.root={folder}",
        f"data.num_workers={workers}",
        f"train.global_batch_size={batch_size}",
        f"eval.batch_size={batch_size}",
        "train.epochs=1000000",
        *overrides,
    ]
    config = load_config("resnet50", options).config
    assert (config.augment.size_px, config.eval.resize_px, config.eval.crop_px) == (
        SIZE_PX,
        RESIZE_PX,
        SIZE_PX,
    )
    context, data = RankContext(RankInfo(), torch.device("cpu")), open_datasets(config.data)
    # one batch for each worker is in transfer
    ready = workers * (PREFETCH_BATCHES + 1)
    preprocess = (
        Normalize(MEAN, STD, context.device, channels_last=True)
        if floats
        else lambda images: images
    )

    def steady(batches: Iterable[Any], count: int) -> Pass:
        return SteadyPasses(((preprocess(batch[0]),) for batch in batches), count, ready)

    if evaluate:
        count = -(-len(data.val) // batch_size)
        make = partial(build_val_batches, config, data.val, context, 1)
        # The package of an older checkout (`--baseline`) lacks arguments.
        parameters = inspect.signature(build_val_batches).parameters
        mean = [MEAN] if "mean" in parameters else []
        if "endless" in parameters:
            return steady(make(*mean, endless=True), count)
        return lambda: sum(len(preprocess(batch[0])) for batch in make(*mean))
    plan = plan_run(config.train, len(data.train), 1)
    loader = build_train_loader(config, data.train, plan, context, MEAN)
    batches = chain.from_iterable(map(loader.epoch, range(10**6)))
    return steady(batches, plan.steps_per_epoch)


def timm(
    folder: str,
    batch_size: int,
    workers: int,
    evaluate: bool = False,
    prefetcher: bool = False,
    policy: str = "",
    uint8: bool = False,
) -> Pass:
    """timm's `create_loader`, as its scripts call it: normalized float batches. uint8: those its
    prefetcher reads.
    """
    import torch
    from timm.data import create_dataset, create_loader

    split = "val" if evaluate else "train"
    dataset = create_dataset(
        "", root=str(Path(folder, split)), split=split, is_training=not evaluate
    )
    training = {"auto_augment": policy or None, "color_jitter": 0.0}
    evaluation = {"crop_pct": SIZE_PX / RESIZE_PX}
    loader = create_loader(
        dataset,
        (3, SIZE_PX, SIZE_PX),
        batch_size,
        is_training=not evaluate,
        use_prefetcher=prefetcher or uint8,
        interpolation="bilinear",
        num_workers=workers,
        device=torch.device("cpu"),
        persistent_workers=True,
        **(evaluation if evaluate else training),
    )
    return passes_over(loader.loader if uint8 else loader)


def torchvision(folder: str, batch_size: int, workers: int, evaluate: bool = False) -> Pass:
    """torchvision's reference: ImageFolder, transforms v1 on Pillow images, DataLoader."""
    from torch.utils.data import DataLoader
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    normalize = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    if evaluate:
        resize = [transforms.Resize(RESIZE_PX), transforms.CenterCrop(SIZE_PX)]
        dataset = ImageFolder(Path(folder, "val"), transforms.Compose([*resize, *normalize]))
        return passes_over(
            DataLoader(dataset, batch_size, num_workers=workers, persistent_workers=workers > 0)
        )
    crop = [transforms.RandomResizedCrop(SIZE_PX), transforms.RandomHorizontalFlip()]
    dataset = ImageFolder(Path(folder, "train"), transforms.Compose([*crop, *normalize]))
    return passes_over(
        DataLoader(
            dataset,
            batch_size,
            True,
            num_workers=workers,
            persistent_workers=workers > 0,
            drop_last=True,
        )
    )


def ffcv(folder: str, batch_size: int, workers: int) -> Pass:
    """FFCV's Loader on its own file, written with its JPEG settings for ImageNet (quality 90), with
    its decoder.
    """
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    path = Path(folder, "train.beton")
    if not path.exists():
        partial = path.with_suffix(".partial")
        image = RGBImageField(write_mode="jpg", max_resolution=500, jpeg_quality=90)
        writer = DatasetWriter(
            str(partial), {"image": image, "label": IntField()}, num_workers=workers
        )
        writer.from_indexed_dataset(ImageFolder(Path(folder, "train")))
        partial.rename(path)
    crop = RandomResizedCropRGBImageDecoder((SIZE_PX, SIZE_PX))
    pipelines = {
        "image": [crop, RandomHorizontalFlip(), ToTensor(), ToTorchImage()],
        "label": [IntDecoder(), ToTensor(), Squeeze()],
    }
    options = {
        "order": OrderOption.RANDOM,
        "os_cache": True,
        "drop_last": True,
        "pipelines": pipelines,
    }
    return passes_over(Loader(str(path), batch_size=batch_size, num_workers=workers, **options))


def dali(folder: str, batch_size: int, workers: int, crop_decode: bool = True) -> Pass:
    """DALI on the CPU: uint8 batches. crop_decode: its decoder draws the crop and skips what is
    outside.
    """
    from nvidia.dali import fn, pipeline_def, types

    files, depth = train_files(folder), 2

    @pipeline_def(
        batch_size=batch_size, num_threads=workers, device_id=None, prefetch_queue_depth=depth
    )
    def pipeline() -> tuple[Any, Any]:
        data, label = fn.readers.file(files=files, random_shuffle=True)
        if crop_decode:
            crop = {"random_area": [0.08, 1.0], "random_aspect_ratio": [3 / 4, 4 / 3]}
            images = fn.decoders.image_random_crop(
                data, device="cpu", output_type=types.RGB, **crop
            )
            images = fn.resize(images, size=[SIZE_PX, SIZE_PX], antialias=True)
        else:
            images = fn.decoders.image(data, device="cpu", output_type=types.RGB)
            images = fn.random_resized_crop(images, size=[SIZE_PX, SIZE_PX], antialias=True)
        mirror = fn.random.coin_flip()
        return fn.crop_mirror_normalize(
            images, dtype=types.UINT8, mirror=mirror, mean=0.0, std=1.0
        ), label

    loader, batches = pipeline(), max(len(files) // batch_size, 1)

    def make(count: int, ready: int = 0) -> int:
        """Make `count` batches, at most `depth` at a time; none is left for the next pass."""
        for done in range(count):
            while ready < min(done + depth, count):
                loader.schedule_run()
                ready += 1
            loader.share_outputs()
            loader.release_outputs()
        return count * batch_size

    loader.schedule_run()  # the first call schedules `depth` batches
    make(depth, ready=depth)
    return lambda: make(batches)


def _read_and_decode(path: str) -> int:
    import torch
    from PIL import Image

    torch.set_num_threads(1)
    data = Path(path).read_bytes()
    try:
        return len(
            torch.ops.image.decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), 3)
        )
    except RuntimeError:  # CMYK
        with Image.open(path) as image:
            return len(image.convert("RGB").getbands())


def decode_only(folder: str, batch_size: int, workers: int) -> Pass:
    """Processes that read and decode every image whole by torchvision, and hand nothing over."""
    import torchvision  # noqa: F401  (registers the operator before the fork)

    files = train_files(folder)
    files = files[: max(len(files) // batch_size, 1) * batch_size]
    pool = multiprocessing.get_context("fork").Pool(workers)
    return lambda: len(pool.map(_read_and_decode, files, chunksize=8))


def decoder(folder: str, batch_size: int, workers: int, method: str) -> Pass:
    """One decoder in one thread: files in memory to RGB, without the CMYK ones, which most of them
    do not decode.
    """
    from PIL import Image

    files, crops, draws = [], [], random.Random(0)
    for path in train_files(folder)[: 4 * batch_size]:
        with Image.open(path) as image:
            mode, (width, height) = image.mode, image.size
        if mode != "CMYK":
            files.append(Path(path).read_bytes())
            crops.append(draw_crop(draws, height, width))
    decode = DECODERS[method]()

    def one_pass() -> int:
        for data, crop in zip(files, crops, strict=True):
            decode(data, crop)
        return len(files)

    return one_pass


Crop = tuple[int, int, int, int]  # top, left, height, width


def draw_crop(draws: random.Random, height: int, width: int) -> Crop:
    """A crop of 8 to 100 % of the area and a ratio of 3:4 to 4:3, as of RandomResizedCrop."""
    while True:
        area, ratio = (
            height * width * draws.uniform(0.08, 1),
            math.exp(draws.uniform(math.log(3 / 4), math.log(4 / 3))),
        )
        rows, columns = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if rows <= height and columns <= width:
            return draws.randint(0, height - rows), draws.randint(0, width - columns), rows, columns


def ours_whole() -> Callable[[bytes, Crop], Any]:
    import torch

    from imagenet_cls.data.decode import decode_rgb

    torch.set_num_threads(1)
    return lambda data, crop: decode_rgb(data)


def ours_region() -> Callable[[bytes, Crop], Any]:
    import torch

    from imagenet_cls.data.decode import decode_region
    from imagenet_cls.data.turbojpeg import Box, find_turbojpeg

    torch.set_num_threads(1)
    assert find_turbojpeg() is not None, "no libjpeg-turbo 3"
    return lambda data, crop: decode_region(data, lambda height, width: Box(*crop))


def torchvision_whole() -> Callable[[bytes, Crop], Any]:
    import torch
    import torchvision  # noqa: F401  (registers the operator)

    torch.set_num_threads(1)
    decode = torch.ops.image.decode_jpeg
    return lambda data, crop: decode(torch.frombuffer(bytearray(data), dtype=torch.uint8), 3)


def pillow_whole() -> Callable[[bytes, Crop], Any]:
    from PIL import Image

    return lambda data, crop: Image.open(io.BytesIO(data)).convert("RGB")


def nvimgcodec_whole() -> Callable[[bytes, Crop], Any]:
    return _nvimgcodec(lambda codec, data, crop: data)


def nvimgcodec_region() -> Callable[[bytes, Crop], Any]:
    def region(codec: Any, data: bytes, crop: Crop) -> Any:
        top, left, height, width = crop
        return codec.CodeStream(data).get_sub_code_stream(
            region=codec.Region(top, left, top + height, left + width)
        )

    return _nvimgcodec(region)


def _nvimgcodec(stream: Callable[[Any, bytes, Crop], Any]) -> Callable[[bytes, Crop], Any]:
    from nvidia import nvimgcodec as codec

    cpu = {"device_id": codec.NVIMGCODEC_DEVICE_CPU_ONLY, "max_num_cpu_threads": 1}
    decode = codec.Decoder(backends=[codec.Backend(codec.CPU_ONLY)], **cpu).decode

    def checked(data: bytes, crop: Crop) -> Any:
        image = decode(stream(codec, data, crop))
        assert image is not None, "not decoded"
        return image.cpu()

    return checked


DECODERS: dict[str, Callable[[], Callable[[bytes, Crop], Any]]] = {
    function.__name__: function
    for function in (
        ours_whole,
        ours_region,
        torchvision_whole,
        pillow_whole,
        nvimgcodec_whole,
        nvimgcodec_region,
    )
}
IMPLEMENTATIONS: dict[str, Callable[..., Pass]] = {
    function.__name__: function
    for function in (ours, timm, torchvision, ffcv, dali, decode_only, decoder)
}


def cpu_seconds() -> float:
    """CPU seconds of this process, of its ended children and of its living workers."""
    # Waits for those that have ended, so that their time counts from here on, not in this pass.
    living = multiprocessing.active_children()
    own, ended = (
        resource.getrusage(resource.RUSAGE_SELF),
        resource.getrusage(resource.RUSAGE_CHILDREN),
    )
    ticks = 0
    for child in living:
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in (own, ended))
    return seconds + ticks / os.sysconf("SC_CLK_TCK")


def versions() -> dict[str, str]:
    found = {each.metadata["Name"].lower(): each.version for each in distributions()}
    wanted = {
        name: version
        for name, version in found.items()
        if name.startswith(PACKAGES) and "tensorrt" not in name
    }
    return {"python": platform.python_version(), **dict(sorted(wanted.items()))}


def main() -> None:
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    one_pass = IMPLEMENTATIONS[arguments.pop("name")](**arguments)
    prepare = getattr(one_pass, "prepare", lambda: None)
    prepare()
    one_pass()
    print(json.dumps(versions()), file=answers, flush=True)
    for _ in sys.stdin:
        prepare()
        cpu, begin = cpu_seconds(), time.perf_counter()
        images = one_pass()
        result = {
            "images": images,
            "seconds": time.perf_counter() - begin,
            "cpu_seconds": cpu_seconds() - cpu,
        }
        print(json.dumps(result), file=answers, flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
