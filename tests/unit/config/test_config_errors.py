"""Wrong configs that are found without torch: each kind of mistake once, with its place and key."""

from pathlib import Path
from typing import Any

import pytest
from config_files import LR, errors_of, load, write
from omegaconf import OmegaConf

from imagenet_cls.config import keys
from imagenet_cls.config.load import format_problems, load_config
from imagenet_cls.config.schema import Kwargs
from imagenet_cls.errors import ConfigError, Problem

# A file, and the beginning of its only error.
FILES: list[tuple[str | bytes, str]] = [
    # what is no config at all
    (b"a: \xff\n", "x.yaml: "),
    ("a: b\x07\n", "x.yaml: "),
    ("- a\n- b\n", "x.yaml: "),
    ("optimizer: {name: adamv}", "x.yaml:1: optimizer.lr: has no value for optimizer.name=adamv"),
    # YAML that is damaged, or beyond the allowed subset
    ("model:\n\tname: x", "x.yaml:2: "),
    ("model:\n  kwargs: {a: 1,\n    a: 2}", "x.yaml:3: key 'a' "),
    ("seed: 1\n---\nseed: 2", "x.yaml:2: "),
    ("model: {kwargs: {a: !!python/object/apply:os.system ['touch pwned']}}", "x.yaml:1: the tag "),
    ("seed: &a [*a]", "x.yaml:1: aliases "),
    ("data: {<<: {root: a}}", "x.yaml:1: data.<<: unknown key"),
    ("model: {kwargs: {[1]: 2}}", "x.yaml:1: a key "),
    # values of another type
    ("train: {epochs: 1.5}", "x.yaml:1: train.epochs: 1.5 "),
    ("ema: {warmup: 1}", "x.yaml:1: ema.warmup: 1 "),
    ("augment: {scale: 0.5}", "x.yaml:1: augment.scale: 0.5 "),
    ("augment: {scale: [0.5, x]}", "x.yaml:1: augment.scale: [0.5, 'x'] "),
    ("data: {root: [a]}", "x.yaml:1: data.root: ['a'] "),
    ("model: {kwargs: 3}", "x.yaml:1: model.kwargs: 3 "),
    ("model: resnet18", "x.yaml:1: model: 'resnet18' "),
    (f"seed: {'9' * 5000}", "x.yaml:1: seed: "),
    # no further problems that follow from a wrong key
    ("optimizer: {l: 0.1}", "x.yaml:1: optimizer.l: "),
    ("data: {val: null, val_fracton: 0.1}", "x.yaml:1: data.val_fracton: "),
    ("loss.name: a", "x.yaml:1: loss.name: "),
    ("data:\n  root: ???\noptimizer: {lr: 1}", "x.yaml:2: data.root: "),
    # references with resolvers, in another form, to no value or to one with references
    ("expect: {note: '${oc.env:HOME}'}", "x.yaml:1: expect.note: "),
    ("expect: {note: '${ oc.env : HOME }'}", "x.yaml:1: expect.note: "),
    ("expect: {note: '${oc.env:${data.root}}'}", "x.yaml:1: expect.note: "),
    ("expect: {note: '${expect.source}{oc.env:HOME}', source: $}", "x.yaml:1: expect.note: "),
    ("expect: {note: '${}'}", "x.yaml:1: expect.note: "),
    ("expect: {note: '${.source}'}", "x.yaml:1: expect.note: "),
    (r"expect: {note: '\${data.root}'}", "x.yaml:1: expect.note: "),
    ("expect: {note: '${train}'}", "x.yaml:1: expect.note: ${train} is not a key "),
    ("model: {kwargs: {a: '${model.kwargs.b}', b: ['${seed}']}}", "x.yaml:1: model.kwargs: "),
    ("model: {name: '${data.root}'}", "x.yaml:1: model.name: "),
    # bases
    ("_base_: 3", "x.yaml:1: _base_: 3: "),
    ("_base_: {a: b}", "x.yaml:1: _base_: {a: 'b'} "),
    ('_base_: "\\0"', "x.yaml:1: _base_: "),
    (f"_base_: {'x' * 5000}", "x.yaml:1: _base_: xxx"),
]


@pytest.mark.parametrize(("text", "line"), FILES, ids=lambda value: str(value)[:20])
def test_error_in_file_names_line_and_key(text: str | bytes, line: str) -> None:
    (found,) = errors_of(text)
    assert found.startswith(line)
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("seed", ""),
        ("=3", ""),
        ("train.epochs=", "train.epochs: null "),
        ("train.epochs.x=3", "train.epochs: {x: 3} "),
        ("_base_=x.yaml", "_base_: "),
        ("data.root='a", ""),
        ("model.kwargs.x=a: b: c", ""),
        ("data.num_workers=true", "data.num_workers: true "),
        ("data.num_workers=-1", "data.num_workers: -1 "),
    ],
)
def test_error_in_override_names_argument_and_key(override: str, line: str) -> None:
    (found,) = errors_of(LR, override)
    assert found.startswith(f"command line {override!r}: {line}")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("modle={}", "'model'"),
        ("train.epcohs=3", "'train.epochs'"),
        ("log.every_step=3", "'log.every_steps'"),
        ("train.precision=fp31", "'fp32' or 'fp16'"),
        ("data.num_workers=atuo", "'auto'"),
        ("expect.note=${train.epoch}", "'train.epochs'"),
        ("model.freeze=conv1.*", "[conv1.*]"),
        # of another section, or another project
        ("crop_pct=1", "'eval.crop_pct'"),
        ("data.batch_size=8", "'train.global_batch_size'"),
        ("optimizer.backbone_lr=0.1", "'optimizer.lr_scales'"),
        ("amp=true", "'train.precision'"),
        ("output_dir=a", "--work-dir"),
        ("data._delete_=true", "a new name resets its section"),
        # similar to nothing
        ("model.xyzzy=1", "model.kwargs"),
        ("xyzzy=1", "size and lr"),
    ],
)
def test_unknown_word_suggests_a_known_one(override: str, named: str) -> None:
    (line,) = errors_of(LR, override)
    assert line.startswith(f"command line {override!r}: ") and named in line


def test_names_of_other_projects_stand_for_keys_of_the_schema() -> None:
    assert not keys.ALIASES.keys() & {*keys.value_types(), *keys.ADVICE}
    meant = {setting.partition("=")[0] for setting in keys.ALIASES.values()}
    assert meant <= keys.value_types().keys()
    assert {name for name in keys.ADVICE if "." in name} <= meant


FOLD = "data.val= data.fold=[4,5]"
GROWTH = "augment.progressive.epochs=[0,9] augment.progressive.sizes_px=[160,224]"
PAD_CROP = "augment.crop=pad_crop augment.pad_px=31"
JSD = "augment.splits=3 loss.name=jsd"
TEACHER = "distill.kind=soft distill.teacher.name=a distill.teacher.pretrained=true"

# Overrides that are right, and those that make them wrong.
RULES = [
    # ranges: both ends, open ends, 0, the largest number; NaN in arguments
    ("train.epochs=1", "train.epochs=0"),
    ("train.epochs=1000000", "train.epochs=1000001"),
    ("ema.decay=0", "ema.decay=1"),
    ("train.clip_norm=1e-9", "train.clip_norm=0"),
    ("optimizer.lr=1e19", "optimizer.lr=1e20"),
    (f"model.kwargs.a={10**400}", f"train.max_steps={10**400}"),
    ("model.kwargs.a=[1,'nan']", "model.kwargs.a=[1,[.nan]]"),
    # lists: each number, order, length
    ("augment.scale=[0.1,1]", "augment.scale=[0,1]"),
    ("augment.scale=[0.5,0.5]", "augment.scale=[0.5,0.4]"),
    ("augment.ratio=[0.5,2]", "augment.ratio=[0.5,1,2]"),
    ("loss.class_weights=[1,2.5]", "loss.class_weights=[1,-2.5]"),
    ("loss.class_weights=balanced", "loss.class_weights=equal"),
    ("data.std=", "data.std=[]"),
    # the form of a text
    ("device=cuda:3", "device=cuda3"),
    ("parallel.init_method=tcp://[::1]:29500", "parallel.init_method=tcp://node-1"),
    ("parallel.init_method=file:///tmp/x", "parallel.init_method=file://x"),
    ("imports=[a.b]", "imports=[a/b.py]"),
    # keys that exclude each other, and limits
    ("model.checkpoint=a.pth", "model.pretrained=true"),
    ("model.head_only=true", "model.freeze=[a]"),
    ("ema.decay=0.5", "ema.half_life_images=9"),
    (FOLD, "data.val_fraction=0.1"),
    ("train.micro_batch_size=256", "train.micro_batch_size=257"),
    ("eval.resize_px=224 eval.crop_px=[192,224]", "eval.crop_px=[192,256]"),
    # data
    ("data.val= data.val_fraction=0.1", "data.val_fraction="),
    ("data.val= data.val_fraction=0.1 data.name=torchvision:CIFAR10", "data.group=a"),
    (FOLD, "data.fold=[5,5]"),
    (f"{FOLD} data.group=[^_]*", "data.group=[^_*"),
    ("data.classes=[b,a]", "data.classes=[a,b,a]"),
    ("data.classes=a.txt", "data.classes=[]"),
    ("data.exclude=a.json", "data.name=synthetic"),
    ("data.channels=1", "data.channels=2"),
    ("data.channels=1 data.mean=[0.5]", "data.mean=[0.5,0.5,0.5]"),
    (TEACHER, "data.channels=1"),
    ("data.channels=1 model.name=resnet18", "model.name=torchvision:resnet18"),
    ("model.kwargs.drop_path_rate=0.5", "model.kwargs.drop_path_rate=2"),
    ("optimizer.kwargs.momentum=0", "optimizer.kwargs.momentum=1.5"),
    # augmentation
    (f"{PAD_CROP} augment.size_px=32", "augment.pad_px=32"),
    (f"{PAD_CROP} augment.size_px=[40,32]", "augment.size_px=[40,31]"),
    (GROWTH, "augment.progressive.epochs=[0]"),
    (GROWTH, "augment.progressive.epochs=[0,91]"),
    (GROWTH, "augment.progressive.sizes_px=[150,224]"),
    (GROWTH, "augment.size_px=256"),
    (GROWTH, "augment.size_px=[160,224]"),
    # mixing, splits and distillation
    ("mix.mixup_alpha=0.2", "loss.name=focal"),
    (JSD, "augment.splits=1"),
    (JSD, "loss.class_weights=[1,2]"),
    (JSD, "loss.name=bce"),
    (f"{JSD} model.split_bn=true", "augment.splits=1 loss.name=bce"),
    (f"{JSD} model.split_bn=true", "parallel.mode=dp"),
    (f"{JSD} model.split_bn=true", "parallel.sync_bn=true"),
    (TEACHER, f"distill.kind=hard {JSD}"),
    (TEACHER, "distill.teacher.name="),
    (TEACHER, "distill.teacher.pretrained=false distill.teacher.checkpoint="),
    # training and devices
    ("schedule.cooldown_epochs=90", "schedule.warmup_epochs=1"),
    ("train.sam_rho=0.1", "train.precision=fp16"),
    ("parallel.backend=nccl device=cuda", "device=cpu"),
    ("parallel.device_ids=[1,0]", "parallel.device_ids=[0,0]"),
    ("parallel.device_ids=[1,0]", "device=cuda:1"),
    ("parallel.mode=dp", "device=cuda:1"),
    ("train.compile=true", "parallel.mode=dp"),
    ("parallel.sync_bn=true", "parallel.mode=dp"),
]


@pytest.mark.parametrize(("right", "wrong"), RULES)
def test_rule_accepts_and_rejects(right: str, wrong: str) -> None:
    words = right.split()
    load(LR, *words)
    words += wrong.split()
    (line,) = errors_of(LR, *words)
    key = (line.partition("': ")[2] or line).partition(":")[0]
    assert any(word.startswith(key) for word in words)


@pytest.mark.parametrize(
    ("value", "right_type"), [({"a": 1}, Kwargs), ([["x"]], None), (None, type(None))]
)
def test_value_of_another_type_is_an_error_of_any_key(value: Any, right_type: Any) -> None:
    config = OmegaConf.create()
    for key in keys.value_types():
        OmegaConf.update(config, key, value)
    wrong = [line.split(": ")[1] for line in errors_of(OmegaConf.to_yaml(config))]
    assert sorted(wrong) == sorted(
        key for key, hint in keys.value_types().items() if right_type not in keys.members(hint)
    )


def test_all_problems_are_reported_at_once() -> None:
    text = "optimizer:\n  lr: many\nmodle: {}\ntrain:\n  epochs: 0\nseed: 1.5\n"
    lines = errors_of(text, "augment.hflip_prob=2", "log.every_step=3")
    assert sorted(": ".join(line.split(": ")[:2]) for line in lines) == [
        "command line 'augment.hflip_prob=2': augment.hflip_prob",
        "command line 'log.every_step=3': log.every_step",
        "x.yaml:2: optimizer.lr",
        "x.yaml:3: modle",
        "x.yaml:5: train.epochs",
        "x.yaml:6: seed",
    ]
    lines = errors_of(f"{LR}seed: !!int 1\nseed: 2\n", "train.epoch=[")
    places = sorted(line.split(": ")[0] for line in lines)
    assert places == ["command line 'train.epoch=['", "x.yaml:2", "x.yaml:3"]


def test_deeply_nested_value_is_an_error() -> None:
    assert errors_of(LR, f"model.kwargs={'{a: ' * 300}1{'}' * 300}")


def test_error_in_a_base_names_both_files() -> None:
    write("a.yaml", "_base_: b.yaml\n")
    write("b.yaml", "seed: [\n")
    assert errors_of("_base_: a.yaml\n")[0].startswith("a.yaml:1: _base_: b.yaml:2: ")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("folder", "folder: "),
        ("memory.yaml", "memory.yaml: "),
        ("circle.yaml", "circle.yaml: "),
        ("own/mine.yml", "'own/mine.yaml'"),
        ("configs/resnet5O.yaml", "/configs/resnet50.yaml'"),
        ("resnet5O", "'resnet50'"),
    ],
)
def test_unreadable_file_is_named_with_a_similar_one(name: str, named: str) -> None:
    Path("folder").mkdir()
    Path("memory.yaml").symlink_to("/proc/self/mem")  # unreadable at its beginning, also for root
    Path("circle.yaml").symlink_to("circle.yaml")
    write("own/mine.yaml", LR)
    with pytest.raises(ConfigError) as caught:
        load_config(name)
    (line,) = caught.value.lines
    assert f"{name}: " in line and named in line


def test_place_of_a_problem_is_that_of_its_key_component_or_section() -> None:
    write("sub/base.yaml", "# a comment\noptimizer:\n  lr: 0.1\n  kwargs:\n    nesterov: true\n")
    overrides = ["train.clip_norm=", "data.root=a", "data.name=json:dumps", "model.kwargs.dorp=1"]
    origins = load("_base_: sub/base.yaml\n\nseed: 3\n", *overrides).origins
    places = {
        "optimizer.lr": "sub/base.yaml:3: ",
        "optimizer.name": "sub/base.yaml:3: ",
        "optimizer.kwargs.nesterov": "sub/base.yaml:5: ",
        "optimizer.kwargs.momentum": "sub/base.yaml:5: ",
        "seed": "x.yaml:3: ",
        "train.clip_norm": "command line 'train.clip_norm=': ",
        "data.kwargs.root": "command line 'data.name=json:dumps': ",
        "data.train": "",
        "model.name": "",
    }
    lines = format_problems([Problem(key, "no") for key in places], origins)
    assert lines == [f"{place}{key}: no" for key, place in places.items()]
