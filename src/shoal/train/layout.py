"""What lies where in the directory of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.checkpoint.branches import branches, place_of
from shoal.core.hub import repo_of

if TYPE_CHECKING:
    from shoal.ir import TrainJob


def model_name(directory: Path) -> str:
    """What a model directory is called: the name of its run, or its own.

    Args:
        directory: a Hugging Face directory, such as ``runs/notes/export``, which is ``notes``; a
            snapshot of the hub has its id.
    """
    place = directory.resolve()
    if (repo := repo_of(place)) is not None:
        return repo
    run = RunDir(place.parent)
    return run.root.name if place == run.export and run.plan.exists() else place.name


@dataclass(frozen=True)
class RunDir:
    """The directory of one run."""

    root: Path

    @property
    def plan(self) -> Path:
        """The plan, written before the first step."""
        return self.root / "plan.yaml"

    def past_plans(self) -> list[Path]:
        """Plans that the run has begun with or gone on under before the newest, by age."""
        return [self.past_plan(n) for n in range(len(list(self.root.glob("plan.*.yaml"))))]

    def past_plan(self, number: int) -> Path:
        """Where the plan before the newest is kept, counted from 0."""
        return self.root / f"plan.{number}.yaml"

    @property
    def lock(self) -> Path:
        """Held by the process that runs here, which it names."""
        return self.root / "run.lock"

    @property
    def events(self) -> Path:
        """Everything that happened, a JSON object a line."""
        return self.root / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The checkpoint store."""
        return self.root / "checkpoints"

    @property
    def dumps(self) -> Path:
        """What each rank holds, as it lies, where ``checkpoint.dump`` asks for it."""
        return Path(place_of(self.root / "dumps", branches(self.root)[-1].number))

    @property
    def ranks(self) -> Path:
        """Heartbeats, logs, stacks and errors of the ranks."""
        return self.root / "ranks"

    @property
    def faults(self) -> Path:
        """What the ranks had recorded at each fault that a robust run has found, by number."""
        return self.root / "faults"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that the run uses."""
        return self.root / "tokenizer.json"

    @property
    def tokens(self) -> Path:
        """Where the prepared corpus lies, for the ranks."""
        return self.root / "tokens.json"

    @property
    def export(self) -> Path:
        """The trained model as a Hugging Face directory."""
        return self.root / "export"

    @property
    def adapter(self) -> Path:
        """What fine-tuning has learned, as an adapter directory."""
        return self.root / "adapter"

    @property
    def report(self) -> Path:
        """Prediction beside measurement."""
        return self.root / "report.json"

    @property
    def timeline(self) -> Path:
        """The passes of one step of the pipeline, as they were done."""
        return self.root / "timeline.json"

    @property
    def page(self) -> Path:
        """The report as a page with curves."""
        return self.root / "report.html"

    def saved_in(self, job: TrainJob) -> Path | str:
        """The checkpoint store of a job's newest branch, which may lie elsewhere."""
        return self.levels_of(job)[0]

    def levels_of(self, job: TrainJob) -> list[Path | str]:
        """All places of the checkpoints of a job's newest branch, nearest first."""
        number = branches(self.root)[-1].number
        return [place_of(place, number) for place in self.places_of(job)]

    def places_of(self, job: TrainJob) -> list[Path | str]:
        """All places of a job's checkpoints, in each of which every branch has its own."""
        nearest = job.checkpoint.path or self.checkpoints
        return [nearest, *(level.path for level in job.checkpoint.levels)]

    def origin_of(self, job: TrainJob) -> tuple[int, list[Path | str]] | None:
        """Step at which the newest branch begins, and the places that may have it.

        None if the run has one branch.
        """
        branch = branches(self.root)[-1]
        if branch.step is None:
            return None
        return branch.step, [place_of(place, branch.of) for place in self.places_of(job)]

    def beat(self, rank: int) -> Path:
        """Heartbeat of a rank."""
        return self.ranks / f"rank-{rank}.beat"

    def log(self, rank: int) -> Path:
        """Output of a rank."""
        return self.ranks / f"rank-{rank}.log"

    def stack(self, rank: int) -> Path:
        """Stacks of a rank, written when it crashes or is asked."""
        return self.ranks / f"rank-{rank}.stack"

    def flight(self, rank: int) -> Path:
        """What a rank has recorded of its collectives and phases."""
        return self.ranks / f"rank-{rank}.flight"

    def error(self, rank: int) -> Path:
        """The error that a rank ended with."""
        return self.ranks / f"rank-{rank}.error"

    def spare(self, rank: int) -> Path:
        """Room for the error of a rank, which a full disk must not keep from being written."""
        return self.ranks / f"rank-{rank}.spare"
