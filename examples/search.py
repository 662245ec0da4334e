"""Search settings with Optuna: `python examples/search.py photos searches/lr 30 [key=value ...]`.

Here 30 trials on the dataset `photos`. Each is a training with a run folder of its own. The study
is a file in `searches/lr`: the same command continues it. Change `settings` for what you search.
"""

import argparse
from pathlib import Path
from typing import Any

import optuna
import yaml

import imagenet_cls


def settings(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "optimizer.lr": trial.suggest_float("lr", 1e-5, 1e-2, log=True),
        "optimizer.weight_decay": trial.suggest_float("weight_decay", 1e-4, 1e-1, log=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", help="a config or a dataset, as of tools/train.py")
    parser.add_argument("out", type=Path, help="the folder of the search")
    parser.add_argument("trials", type=int)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    pairs = (text.split("=", 1) for text in arguments.overrides)
    fixed = {key: yaml.safe_load(value) for key, value in pairs}

    def train(trial: optuna.Trial) -> float:
        run = imagenet_cls.train(
            arguments.source,
            {**fixed, **settings(trial)},
            work_dir=arguments.out / f"trial-{trial.number:03}",
        )
        return run.best["top1_pct"]

    arguments.out.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        direction="maximize",
        storage=f"sqlite:///{arguments.out.resolve()}/study.db",
        study_name="search",
        load_if_exists=True,
    )
    study.optimize(train, n_trials=arguments.trials)
    print(study.best_trial.params, study.best_value)


if __name__ == "__main__":
    main()
