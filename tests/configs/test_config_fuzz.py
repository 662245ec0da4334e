"""2,000 mutations of the shipped configs: each ends in exit code 2 with the key named, or is legal and loads.

hypothesis draws them, without chance. `examined` says what holds for all of them.
"""

import random
import shutil
import sys
import time
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import mutations
import pytest
from helpers import REPOSITORY, run
from hypothesis import HealthCheck, Phase, given, settings
from mutations import KINDS_OF_SLIPS, LETTERS, Mutation, child_of, slipped

from imagenet_cls.config import keys
from imagenet_cls.config.load import Loaded, dump_yaml, load_config
from imagenet_cls.errors import ConfigError

SECRET = "hunter2-from-the-environment"
SETTINGS = settings(
    derandomize=True, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of configs/; the working directory is a folder of its own, where nothing may be left."""
    root = tmp_path_factory.mktemp("fuzz")
    shutil.copytree(REPOSITORY / "configs", root / "configs")
    (root / "configs" / "here_and_there.yaml").symlink_to("here_and_there.yaml")
    for i in range(500):
        (root / "configs" / f"chain_{i}.yaml").write_text(f"_base_: chain_{i + 1}.yaml\n")
    (root / "here").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root / "here")
        patch.setenv("FUZZ_SECRET", SECRET)
        yield root / "configs"
        assert list((root / "here").iterdir()) == []


def examined(tree: Path, mutation: Mutation) -> Loaded | list[str]:
    """Load it. What comes of it: a config, or a line for each problem; nothing else, soon, and no secret in either."""
    file = tree / mutation.beside.parent / "fuzz.yaml"
    file.write_bytes(mutation.text)
    started = time.process_time()  # and not the clock: others use this machine, too
    outcome: Loaded | list[str]
    try:
        outcome = load_config(file, mutation.words)
        shown = dump_yaml(outcome.config)
    except ConfigError as error:
        assert error.exit_code == 2 and error.lines
        outcome, shown = error.lines, str(error)
        assert all("\n" not in line and len(line) < 1000 for line in error.lines), error.lines
        assert mutation.fails is not False, error.lines
        assert mutation.named in shown, shown
    else:
        assert mutation.fails is not True, "this must not load"
    assert time.process_time() - started < 2
    assert SECRET not in shown
    return outcome


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        (mutations.misspelt, 420),
        (mutations.wrongly_typed, 340),
        (mutations.out_of_range, 320),
        (mutations.missing, 80),
        (mutations.given_twice, 120),
        (mutations.exclusive, 60),
        (mutations.spoilt, 320),
        (mutations.wrongly_encoded, 60),
        (mutations.marked, 20),
        (mutations.tagged, 120),
        (mutations.hostile, len(mutations.HOSTILE)),
        (mutations.resolved, 110),
    ],
)
def test_a_mutated_config_is_told_or_loads(tree: Path, kind: Callable[[], Any], count: int) -> None:
    outcomes: list[tuple[Mutation, list[str]]] = []

    @settings(SETTINGS, max_examples=count)
    @given(mutation=kind())
    def examine(mutation: Mutation) -> None:
        found = examined(tree, mutation)
        outcomes.append((mutation, [] if isinstance(found, Loaded) else found))

    examine()
    assert len(outcomes) >= count * 0.9, "hypothesis found fewer different ones"
    told = [(one.meant, line) for one, lines in outcomes for line in lines if one.meant and one.named in line]
    assert kind is not mutations.misspelt or len(told) > 300
    assert not told or right_pct(told) >= 95, wrong_ones(told)


# ---------------------------------------------------------------------------------------- the right suggestion


def right_pct(told: list[tuple[str, str]]) -> float:
    """told: what was meant, and the message. The share of the messages that suggest it."""
    rate = 100 - 100 * len(wrong_ones(told)) / len(told)
    print(f"the right one was suggested for {rate:.1f} % of {len(told)} slips")
    return rate


def wrong_ones(told: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(meant, line) for meant, line in told if meant not in line.partition("did you mean")[2]]


def slips(name: str, each: int) -> list[str]:
    """Up to `each` different slips of each kind, none of which is `name`; drawn from the name itself."""
    draw = random.Random(name)
    found = set()
    for kind in KINDS_OF_SLIPS:
        found |= {slipped(name, kind, draw.randrange(len(name)), draw.choice(LETTERS)) for _ in range(each)}
    return sorted(found - {name, ""})


def test_the_right_word_is_suggested(tree: Path) -> None:
    """For keys that take one of some words."""
    told = []
    for key, hint in keys.leaves().items():
        bare, _ = keys.split_optional(hint)
        words = typing.get_args(bare) if typing.get_origin(bare) is Literal else ()
        for word in words:
            for wrong in slips(word, 1) if len(word) > 2 else ():
                if wrong not in words:
                    lines = examined(tree, Mutation(Path("demo.yaml"), child_of(Path("demo.yaml"), key, repr(wrong))))
                    assert isinstance(lines, list)
                    told += [(f"'{word}'", line) for line in lines if ".".join(key) in line]
    assert len(told) > 80 and right_pct(told) >= 95, wrong_ones(told)


# What is set, with a name in it that is misspelt; and what else it takes.
NAMES = {
    "model.name=[resnet50]": (),
    "model.name=[convnext_tiny]": (),
    "model.name=[deit3_small_patch16_224]": (),
    "model.name=torchvision:[regnet_y_400mf]": (),
    "model.kwargs.[zero_init_last]=false": ("model.name=resnet18",),
    "optimizer.name=[rmsprop]": ("optimizer.lr=0.1",),
    "optimizer.name=timm:[lamb]": ("optimizer.lr=0.1",),
    "optimizer.kwargs.[momentum]=0.9": ("optimizer.name=sgd", "optimizer.lr=0.1"),
    "schedule.name=[plateau]": (),
    "schedule.kwargs.[min_lr]=0.1": ("schedule.name=cosine",),
    "loss.name=[cross_entropy]": (),
    "data.name=[synthetic]": (),
    "data.name=torchvision:[CIFAR10]": (),
    "augment.policy=torchvision:[trivial_augment_wide]": (),
}


def test_the_right_name_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    """For names and keywords of models, optimizers and the like, which the second stage knows."""
    from imagenet_cls.engine.check import config_problems

    told = []
    for text, others in NAMES.items():
        before, _, rest = text.partition("[")
        name, _, behind = rest.partition("]")
        for wrong in slips(name, 1):
            loaded = load_config(REPOSITORY / "configs" / "demo.yaml", [f"{before}{wrong}{behind}", *others])
            problems = [
                problem for problem in config_problems(loaded.config, 1) if wrong in problem.key + problem.message
            ]
            told += [(name, problem.message) for problem in problems]
    assert len(told) > 45 and right_pct(told) >= 95, wrong_ones(told)


# ------------------------------------------------------------------------------------------------- in a process

MISTAKES = {
    "train: {epochs: 1": "fuzz.yaml:",
    "seed: !!python/object/apply:os.system ['touch pwned']": "seed: the tag",
    "expect: {note: '${oc.env:FUZZ_SECRET}'}": "expect.note: the resolver 'oc.env'",
    "train: {epohs: 1}": "did you mean 'train.epochs'?",
}


@pytest.mark.parametrize("tool", ["train.py", "test.py", "print_config.py"])
def test_the_tools_end_with_code_2_and_a_line(tree: Path, tool: str) -> None:
    for text, said in list(MISTAKES.items())[:: 1 if tool == "print_config.py" else 2]:
        (tree / "fuzz.yaml").write_text(f"_base_: demo.yaml\n{text}\n")
        ended = run([sys.executable, str(REPOSITORY / "tools" / tool), str(tree / "fuzz.yaml")], 60)
        assert (ended.returncode, ended.stdout) == (2, "") and said in ended.stderr, ended
        assert len(ended.stderr.splitlines()) <= 3 and "Traceback" not in ended.stderr and SECRET not in ended.stderr
