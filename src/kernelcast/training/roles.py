"""Which layers tensor parallelism cuts, and how: Megatron's cut, told by the names that public models give them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Role = Literal["column", "row", "vocabulary", "experts"]

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


@dataclass(frozen=True)
class Roles:
    """A table of patterns -> roles; give another one for a model with other names."""

    table: Mapping[str, Role] = field(default_factory=lambda: MEGATRON)

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Role]]:
        return [(re.compile(rf"(?:^|\.)(?:{pattern})$"), role) for pattern, role in self.table.items()]

    def of(self, path: str) -> Role | None:
        return next((role for pattern, role in self._patterns if pattern.search(path)), None)
