"""A trained drafter's files, and whether they are for the model that is served."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.errors import ModelError
from shoal.ir import ServeJob

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.drafters.files import DrafterConfig

__all__ = ["stored"]


def stored(name: str, directory: Path, job: ServeJob) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """What lies in a drafter's directory.

    Raises:
        ModelError: it is of another kind, or for another model or tokenizer than the job's.
    """
    from shoal.model.drafters import files

    found = files.read(directory)
    if found.config.name != name:
        raise ModelError(
            f"{directory}: a drafter of kind {found.config.name}, and speculative is {name}; give "
            f"speculative: {{name: {found.config.name}, path: {directory}}}"
        )
    model = Path(job.model)
    files.check_target(
        found.config,
        target=files.fingerprint(model),
        tokenizer=files.tokenizer_hash(model),
        where=str(directory),
    )
    return found.config, found.state
