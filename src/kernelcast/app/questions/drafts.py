"""Who guesses tokens ahead: another model, or the model's own further layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from kernelcast.app.questions.words import flag
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.inference.deployment import Deployment
    from kernelcast.inference.workload import Speculation
    from kernelcast.models.architecture import Architecture

OWN_LAYERS = "mtp"
DraftModel = Annotated[
    str | None,
    flag("--draft-model", metavar="MODEL", help="that guesses; mtp: the model's own prediction layers"),
]


def speculation(
    draft_tokens: int,
    acceptance: float,
    draft_model: str | None,
    place: Deployment,
    deployed: Callable[[Architecture], Deployment],
) -> Speculation | None:
    """What the options say; a draft of its own layers runs where and as the model does."""
    from kernelcast import models
    from kernelcast.inference.workload import Speculation
    from kernelcast.models.architecture import draft_of

    if not draft_tokens:
        if draft_model:
            raise KernelcastError("--draft-model needs --draft-tokens, as in --draft-tokens 4")
        return None
    if draft_model is None:
        return Speculation(draft_tokens, acceptance)
    draft = draft_of(place.model) if draft_model == OWN_LAYERS else models.model(draft_model)
    return Speculation(draft_tokens, acceptance, deployed(draft))
