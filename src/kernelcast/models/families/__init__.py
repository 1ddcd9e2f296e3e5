"""The layers of each model_type: one short reader for its mixer, one for its feed-forward part."""

from kernelcast.models.families import dense, hybrid, latent, sparse
from kernelcast.models.fields import Family

FAMILIES: dict[str, Family] = {**dense.FAMILIES, **sparse.FAMILIES, **latent.FAMILIES, **hybrid.FAMILIES}
