"""Mutated shipped configs: each ends in a ConfigError that names the key, or is valid and loads.

Hypothesis draws them deterministically: about 200 by default, about 2,000 with `-m nightly`.
"""

import random
import shutil
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import mutations
import pytest
from helpers import REPOSITORY, run
from hypothesis import HealthCheck, Phase, given, settings
from mutations import KINDS_OF_TYPOS, LETTERS, Mutation, child_of, with_typo

from imagenet_cls.config import keys
from imagenet_cls.config.load import Loaded, dump_yaml, load_config
from imagenet_cls.errors import ConfigError

SECRET = "hunter2-from-the-environment"
SETTINGS = settings(
    derandomize=True, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of configs/. The working directory is an empty folder, and has to stay empty."""
    root = tmp_path_factory.mktemp("fuzz")
    shutil.copytree(REPOSITORY / "configs", root / "configs")
    (root / "configs" / "here_and_there.yaml").symlink_to("here_and_there.yaml")
    for i in range(60):
        (root / "configs" / f"chain_{i}.yaml").write_text(f"_base_: chain_{i + 1}.yaml\n")
    (root / "here").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root / "here")
        patch.setenv("FUZZ_SECRET", SECRET)
        yield root / "configs"
        assert list((root / "here").iterdir()) == []


def load_mutation(tree: Path, mutation: Mutation) -> Loaded | list[str]:
    """The config, or the lines of the error. Fails on any other exception, and if a secret shows up."""
    file = tree / mutation.beside.parent / "fuzz.yaml"
    file.write_bytes(mutation.text)
    outcome: Loaded | list[str]
    try:
        outcome = load_config(file, mutation.overrides)
        shown = dump_yaml(outcome.config)
    except ConfigError as error:
        assert error.exit_code == 2 and error.lines
        outcome, shown = error.lines, str(error)
        assert all("\n" not in line and len(line) < 1000 for line in error.lines), error.lines
        assert mutation.fails is not False, error.lines
        assert mutation.named in shown, shown
    else:
        assert mutation.fails is not True, "this must not load"
    assert SECRET not in shown
    return outcome


def load_mutations(tree: Path, kind: Callable[[], Any], count: int) -> list[tuple[str, str]]:
    """Load `count` mutations of one kind; the key that was meant and the line that should suggest it."""
    suggestions: list[tuple[str, str]] = []

    @settings(SETTINGS, max_examples=count)
    @given(mutation=kind())
    def load_each(mutation: Mutation) -> None:
        found = load_mutation(tree, mutation)
        if mutation.meant and not isinstance(found, Loaded):
            suggestions.extend((mutation.meant, line) for line in found if mutation.named in line)

    load_each()
    return suggestions


KINDS = {
    mutations.misspelled: 420,
    mutations.wrong_type: 340,
    mutations.out_of_range: 320,
    mutations.missing_value: 80,
    mutations.duplicate_key: 120,
    mutations.exclusive_keys: 60,
    mutations.corrupted: 320,
    mutations.wrong_encoding: 60,
    mutations.byte_order_mark: 20,
    mutations.yaml_tag: 120,
    mutations.hostile: len(mutations.HOSTILE),
    mutations.resolver: 110,
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_mutated_config_loads_or_names_the_key(tree: Path, kind: Callable[[], Any]) -> None:
    load_mutations(tree, kind, 16)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_many_mutated_configs_load_or_name_the_key(tree: Path, kind: Callable[[], Any]) -> None:
    suggestions = load_mutations(tree, kind, KINDS[kind])
    assert kind is not mutations.misspelled or len(suggestions) > 300
    assert_mostly_right(suggestions)


def assert_mostly_right(suggestions: list[tuple[str, str]]) -> None:
    """At least 95 % of the messages suggest what was meant."""
    wrong = [(meant, line) for meant, line in suggestions if meant not in line.partition("did you mean")[2]]
    assert len(wrong) <= 0.05 * len(suggestions), wrong


def typos(name: str) -> list[str]:
    """A typo of each kind; drawn from the name itself."""
    draw = random.Random(name)
    found = {with_typo(name, kind, draw.randrange(len(name)), draw.choice(LETTERS)) for kind in KINDS_OF_TYPOS}
    return sorted(found - {name, ""})


@pytest.mark.nightly
def test_typo_of_a_choice_suggests_it(tree: Path) -> None:
    suggestions = []
    for key, hint in keys.leaves().items():
        bare, _ = keys.split_optional(hint)
        choices = typing.get_args(bare) if typing.get_origin(bare) is Literal else ()
        for choice in choices:
            for wrong in typos(choice) if len(choice) > 2 else ():
                if wrong not in choices:
                    text = child_of(Path("demo.yaml"), key, repr(wrong))
                    lines = load_mutation(tree, Mutation(Path("demo.yaml"), text))
                    assert isinstance(lines, list)
                    suggestions += [(f"'{choice}'", line) for line in lines if ".".join(key) in line]
    assert len(suggestions) > 80
    assert_mostly_right(suggestions)


# An override with a name in brackets that gets a typo, and other overrides.
NAMES = {
    "model.name=[resnet50]": (),
    "model.name=[convnext_tiny]": (),
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


@pytest.mark.nightly
def test_typo_of_a_name_in_a_library_suggests_it() -> None:
    from imagenet_cls.engine.check import config_problems

    suggestions = []
    for text, others in NAMES.items():
        before, _, rest = text.partition("[")
        name, _, after = rest.partition("]")
        for wrong in typos(name):
            config = load_config(REPOSITORY / "configs" / "demo.yaml", [f"{before}{wrong}{after}", *others]).config
            problems = [problem for problem in config_problems(config, 1) if wrong in problem.key + problem.message]
            suggestions += [(name, problem.message) for problem in problems]
    assert len(suggestions) > 40
    assert_mostly_right(suggestions)


MISTAKES = {
    "train: {epochs: 1": "fuzz.yaml:",
    "seed: !!python/object/apply:os.system ['touch pwned']": "seed: the tag",
    "expect: {note: '${oc.env:FUZZ_SECRET}'}": "expect.note: ",
    "train: {epohs: 1}": "did you mean 'train.epochs'?",
}


@pytest.mark.parametrize("tool", ["train.py", "test.py", "print_config.py"])
def test_tool_ends_with_code_2_and_a_line(tree: Path, tool: str) -> None:
    for text, message in list(MISTAKES.items())[:: 1 if tool == "print_config.py" else 3]:
        (tree / "fuzz.yaml").write_text(f"_base_: demo.yaml\n{text}\n")
        ended = run([sys.executable, str(REPOSITORY / "tools" / tool), str(tree / "fuzz.yaml")], 60)
        assert (ended.returncode, ended.stdout) == (2, "") and message in ended.stderr, ended
        assert len(ended.stderr.splitlines()) <= 3 and "Traceback" not in ended.stderr and SECRET not in ended.stderr
