"""Which layers tensor parallelism cuts, and how: Megatron's cut, told by the names that public models give them; or a
plan, which says it module by module."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from kernelcast.errors import KernelcastError

# gathered: by columns, and every rank is given the others' outputs. whole: every rank has all of it.
Role = Literal["column", "row", "vocabulary", "experts", "gathered", "whole"]

# How a module's path ends. column: each rank has some of the outputs (heads, width of the MLP). row: each has some of
# the inputs, and the outputs are summed. vocabulary: each has some of the rows of a table of tokens. experts: a block
# of grouped products, the first by columns and the second by rows. The first pattern that fits counts.
MEGATRON: dict[str, Role] = {
    r"experts": "experts",
    # attention in
    r"(q|k|v)_proj": "column",
    r"(qkv|qkv_proj|query_key_value|Wqkv|W_pack|c_attn|in_proj|linear_qkv|to_qkv)": "column",
    r"(query|key|value|to_q|to_k|to_v|q_lin|k_lin|v_lin|wq|wk|wv)": "column",
    r"(SelfAttention|EncDecAttention)\.(q|k|v)": "column",
    r"(q_b_proj|kv_b_proj)": "column",  # MLA: from the small latent to heads
    # attention out
    r"(o_proj|out_proj|out_lin|wo|linear_proj)": "row",
    r"(attn|attention|self_attn|self_attention)\.(c_proj|dense|proj|o)": "row",
    r"attention\.output\.dense": "row",
    r"(SelfAttention|EncDecAttention)\.o": "row",
    r"to_out\.0": "row",
    # MLP in
    r"(gate_proj|up_proj|gate_up_proj|c_fc|fc1|fc_in|wi|wi_0|wi_1|w1|w3|lin1|linear_fc1|dense_h_to_4h)": "column",
    r"intermediate\.dense": "column",
    # MLP out
    r"(down_proj|fc2|fc_out|w2|lin2|linear_fc2|dense_4h_to_h)": "row",
    r"mlp\.(c_proj|proj)": "row",
    r"output\.dense": "row",
    # tables of tokens
    r"(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|embed|shared)": "vocabulary",
    r"(lm_head|embed_out|output_layer)": "column",
    r"(predictions\.decoder|cls\.predictions\.decoder)": "column",
}


# What Hugging Face's plans call them.
STYLES: dict[str, Role] = {
    "colwise": "column", "packed_colwise": "column", "rowwise": "row", "packed_rowwise": "row",
    "rowwise_split_input": "row", "colwise_gather_output": "gathered", "colwise_rep": "gathered",
    "embedding_rowwise": "vocabulary", "vocabulary": "vocabulary", "moe_tp_experts": "experts", "experts": "experts",
    "grouped_gemm": "experts", "replicate": "whole", "replicated": "whole", "replicated_with_grad_allreduce": "whole",
    "ep_router": "whole", "mla_kv_a_proj": "whole", "sequence_parallel": "whole", "gather": "whole",
}  # fmt: skip


@dataclass(frozen=True)
class Roles:
    """A table of patterns -> roles; give another one for a model with other names."""

    table: Mapping[str, Role] = field(default_factory=lambda: MEGATRON)

    @classmethod
    def of_plan(cls, plan: Mapping[str, str], beside: Mapping[str, Role] | None = None) -> Roles:
        """``layers.*.mlp.up_proj = "colwise"``: how a path ends, where a star is one name. ``beside``: what comes
        first. A plan's entries for parameters (``experts.gate_up_proj``) say nothing that the module's own does not."""
        for path, style in plan.items():
            if style not in STYLES:
                raise KernelcastError(f"the plan cuts {path} {style!r}; known: {', '.join(STYLES)}")
        parts = {path: ".".join("[^.]+" if x == "*" else re.escape(x) for x in path.split(".")) for path in plan}
        return cls({**(beside or {}), **{parts[path]: STYLES[style] for path, style in plan.items()}})

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Role]]:
        return [(re.compile(rf"(?:^|\.)(?:{pattern})$"), role) for pattern, role in self.table.items()]

    def of(self, path: str) -> Role | None:
        return next((role for pattern, role in self._patterns if pattern.search(path)), None)


def read_plan(path: Path) -> dict[str, str]:
    """Of a TOML or JSON file: module -> how it is cut, at the top or in a table ``tp_plan``."""
    try:
        text = path.read_text(encoding="utf-8")
        found: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise KernelcastError(f"{path} is no plan: {' '.join(str(error).split())}") from error
    found = found.get("tp_plan", found) if isinstance(found, dict) else found
    if not isinstance(found, dict) or not found or not all(isinstance(style, str) for style in found.values()):
        raise KernelcastError(f'{path} is no plan: it must name modules, as in "layers.*.mlp.up_proj" = "colwise"')
    return dict(found)
