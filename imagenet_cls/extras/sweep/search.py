"""The search of a sweep: Optuna draws the values of each run, and stops runs early."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from imagenet_cls.commands.own_data import type_of_key
from imagenet_cls.config.metrics import BY_NAME
from imagenet_cls.errors import CheckpointError, UsageError, explain_content_errors
from imagenet_cls.extras.sweep.plan import (
    RANGE,
    REPEATS,
    WHOLE_NUMBER,
    SweepRun,
    load_runs,
    overrides_of,
    split_overrides,
)
from imagenet_cls.extras.sweep.results import best_result
from imagenet_cls.report.jsonl import read_metrics


class Search:
    """A search, each trial of which is a run.

    The study of Optuna is in memory. `runs` builds it again from the runs of an earlier call.

    ranges: Optuna's distribution of each key. configs: of runs that have both ends of each range,
    and every listed value. Raises UsageError, and ConfigError with the problems of all these.
    """

    def __init__(self, folder: Path, source: Sequence[str], overrides: Sequence[str]):
        try:
            import optuna
        except ImportError as error:
            raise UsageError(
                "--search needs the package optuna, which is not installed.",
                "Install it (pip install optuna), or this package with its extra `search`.",
            ) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna = optuna
        self.study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner())
        self.folder = folder
        self.arguments = [*source, *overrides]
        self.fixed = list(source)
        self.ranges: dict[str, Any] = {}
        self._trials: dict[str, Any] = {}  # by the name of the run
        to_check: dict[str, list[str]] = {}
        for key, texts in split_overrides(overrides).items():
            match = RANGE.fullmatch(texts[0])
            if len(texts) == 1 and match is None:
                self.fixed.append(f"{key}={texts[0]}")
                continue
            if key in REPEATS:
                raise UsageError(
                    f"{key}: a trial of --search is one run.", "Give the key one value."
                )
            if len(texts) > 1:
                self.ranges[key] = optuna.distributions.CategoricalDistribution(texts)
                to_check[key] = texts
            else:
                assert match is not None
                self.ranges[key] = self._range(key, *match.groups())
                to_check[key] = [match[2], match[3]]
        if not self.ranges:
            raise UsageError(
                "--search: no key has a range.", "Give one, such as optimizer.lr=log:0.01..1."
            )
        chosen = [
            {key: texts[i % len(texts)] for key, texts in to_check.items()}
            for i in range(max(map(len, to_check.values())))
        ]
        self.configs = load_runs([[*self.fixed, *overrides_of(values)] for values in chosen])
        self.metric = BY_NAME[self.configs[0].config.checkpoint.best]

    def _range(self, key: str, log: str | None, low: str, high: str) -> Any:
        """The distribution of `low..high`. Whole numbers if both are, and the key takes them."""
        distributions = self.optuna.distributions
        try:
            are_whole = WHOLE_NUMBER.fullmatch(low) and WHOLE_NUMBER.fullmatch(high)
            if are_whole and type_of_key(key) is not float:
                return distributions.IntDistribution(int(low), int(high), log=log is not None)
            return distributions.FloatDistribution(float(low), float(high), log=log is not None)
        except ValueError as error:
            raise UsageError(f"{key}: {error}", "Give another range.") from error

    def runs(self, known: Iterable[SweepRun], trials: int) -> Iterator[SweepRun]:
        """The runs to start, up to `trials` in all. known: all runs in the folder."""
        others = [run for run in known if run.search != self.arguments]
        earlier = [run for run in known if run.search == self.arguments]
        unfinished = []
        for run in earlier:
            state, value = self._outcome(run)
            if state == self.optuna.trial.TrialState.FAIL:
                unfinished.append(run)
                continue
            with explain_content_errors(CheckpointError, self.folder / "sweep.json"):
                trial = self.optuna.trial.create_trial(
                    state=state,
                    value=value,
                    params=run.values,
                    distributions=self.ranges,
                    intermediate_values=self._evaluations(run),
                )
                self.study.add_trial(trial)
        for run in unfinished:
            self.study.enqueue_trial(run.values)
            self._trials[run.name] = self.study.ask(self.ranges)
            yield run
        for number in range(len(earlier), trials):
            # Values depend on the number and the results, also after an interruption.
            self.study.sampler = self.optuna.samplers.TPESampler(seed=number)
            trial = self.study.ask(self.ranges)
            name = f"trial-{len(others) + number:03}"
            self._trials[name] = trial
            yield SweepRun(name, trial.params, self.fixed, search=self.arguments)

    def should_prune(self, run: SweepRun) -> bool:
        """Report the new results of a run to the study. Returns whether the pruner stops the run:
        its best result is below the median of the others at a step.
        """
        trial = self._trials[run.name]
        reported = self.study.trials[trial.number].intermediate_values
        for step, value in self._evaluations(run).items():
            if step not in reported:
                trial.report(value, step)
                if trial.should_prune():
                    return True
        return False

    def tell(self, run: SweepRun) -> None:
        """Pass the outcome of a run that has ended to the study."""
        state, value = self._outcome(run)
        self.study.tell(self._trials[run.name], value, state)

    def _outcome(self, run: SweepRun) -> tuple[Any, float | None]:
        states = self.optuna.trial.TrialState
        result = best_result(self.folder / run.name)
        if result is not None:
            metric, value = result
            return states.COMPLETE, metric.score(value)
        return (states.PRUNED if run.pruned else states.FAIL), None

    def _evaluations(self, run: SweepRun) -> dict[int, float]:
        """The best score of the raw and the EMA weights by step."""
        found: dict[int, float] = {}
        file = self.folder / run.name / "metrics.jsonl"
        for record in read_metrics(file, "eval") if file.is_file() else ():
            value = self.metric.score(record[self.metric.field])
            found[record["step"]] = max(value, found.get(record["step"], value))
        return found
