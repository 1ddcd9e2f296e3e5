"""Who guesses tokens ahead: another model, or the model's own further layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from kernelcast.errors import KernelcastError
from kernelcast.questions.words import flag

if TYPE_CHECKING:
    from kernelcast.networks.architecture import Architecture
    from kernelcast.networks.deployment import Deployment
    from kernelcast.serving.workload import Speculation

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
    from kernelcast import networks
    from kernelcast.networks.architecture import draft_of
    from kernelcast.serving.workload import Speculation

    if not draft_tokens:
        if draft_model:
            raise KernelcastError("--draft-model needs --draft-tokens, as in --draft-tokens 4")
        return None
    if draft_model is None:
        return Speculation(draft_tokens, acceptance)
    draft = draft_of(place.model) if draft_model == OWN_LAYERS else networks.model(draft_model)
    return Speculation(draft_tokens, acceptance, deployed(draft))
