"""Kernel launches of a transformer's training step: forward, backward and recomputation of each layer on one rank.

A layer, the embedding and the head are units. Each yields the kernels of its passes and the exchanges between GPUs with
what runs beside them.
"""

from __future__ import annotations

from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.forecast.calls import Call, Launch
from kernelcast.hardware.gpu import TCGEN05, WGMMA
from kernelcast.models.layers import (
    CompressedAttention,
    Dense,
    Experts,
    Kda,
    LatentAttention,
    Layer,
    LinearAttention,
    Mamba2,
    Mixer,
    Parallel,
    SelfAttention,
)
from kernelcast.training.layer_kernels import CONTEXT, EXPERT, LOOP, Kernel, LayerKernels, Unit

# Values read and written for each element of a tensor, by fused kernels and by those of eager PyTorch.
# Rows read and written; they reach 0.5 of DRAM's rate where other fused kernels reach 0.67 (SimuMax, the file of
# layer_kernels.py: permute_fwd and permute_bwd). Eager: an index, a gather, products with the router's weights.
_PERMUTATION = {True: (2.7, 2.7), False: (6.0, 6.0)}
_EXPERT_BIAS = (2.0, 1.0)  # added to each expert's rows; its gradient is their sum
_ROPE = {True: (2.0, 2.0), False: (10.0, 10.0)}  # eager: rotated halves are joined, two products, a sum
_LOSS = (9.0, 9.0)  # eager: logits to fp32, their softmax, its gradient, to 16 bits
_EMBEDDING = (2.0, 3.0)
# What fused kernels reach in attention's backward pass over the forward's FLOP/s. H100, head size 128, 8,192 tokens:
# cuDNN 518 and 600 TFLOP/s, FlashAttention-2 318 and 370 (FlashAttention-3, arXiv 2407.08608, figures 5 and 6).
BACKWARD_RATE = 0.86
# Keys wider than values: cuDNN on B200, 192 and 128 numbers, 64 and 128 heads, 4,096 tokens: 0.61 and 0.64 of the peak,
# 0.89 and 0.83 forward (SimuMax, the same file: sdp_bwd, sdp_fwd)
WIDE_KEYS_RATE = 0.73
FP8_ATTENTION = 1.4  # times 16-bit kernels: forward at head size 128, 8,192 tokens, H100 (the same paper, figure 7)
# State-space and delta-rule mixers: the forward pass again, as nothing but its inputs is kept (mamba_ssm's
# ssd_combined.py), and gradients of both operands of every product, at attention's 2.5 for what it makes again itself.
BACKWARD_SCAN = 3.5


class Builder(LayerKernels):
    """Units of a job."""

    def embedding(self) -> Unit:
        self.unit = unit = Unit()
        forward, backward = _EMBEDDING
        self.vector("embedding", self.outside, self.hidden, (forward, 0.0 if self.adapted else backward), "embedding",
                    vocab=-(-self.model.vocab // self.tp))  # fmt: skip
        unit.tensors += 1
        self.dropout("embedding", self.outside, self.hidden)
        if self.tp > 1:  # the table is sharded over tokens' ids
            size = self.tokens * self.hidden * self.width_bytes
            self._exchange("forward", "reduce_scatter" if self.apart else "all_reduce", size)
            if self.apart and not self.adapted:
                self._exchange("backward", "all_gather", size)
        return unit

    def head(self) -> Unit:
        """The last norm, logits, and the loss over them."""
        self.unit = unit = Unit()
        self.norm(op=self.model.final_norm or self.norm_op)
        vocab = -(-self.model.vocab // self.tp)
        self.linear("head", vocab, self.hidden, narrow=False)
        values = self.stack.loss_values if self.stack.fused_cross_entropy else _LOSS
        self.vector("loss", self.tokens, vocab, values, f"loss_{self.model.kind}")
        if self.model.tied_embeddings and "fork" in self.stack.kernels:  # gradients of the table's two uses
            self.vector("embedding", vocab, self.hidden, (0.0, 0.0 if self.adapted else 3.0), "fork")
        return unit

    def layer(self, layer: Layer) -> Unit:
        self.unit = unit = Unit()
        with self.module("op"):
            self._sublayers(layer)
        return unit

    def _sublayers(self, layer: Layer) -> None:
        norm = self.norm_op = layer.norms.op
        if layer.attention is not None:
            self.norm(op=norm)
            self.mixer(layer.attention)
            if layer.norms.behind:
                self.norm(op=norm)
            self.residual()
        if layer.mlp is not None:
            self.norm(op=norm)
            if isinstance(layer.mlp, Dense):
                with self.module("mlp"):
                    self.dense(layer.mlp, "mlp")
            else:
                with self.module("moe"):
                    self.experts(layer.mlp)
            if layer.norms.behind:
                self.norm(op=norm)
            self.residual()

    def joined(self) -> Unit:
        """What a module for multi-token prediction has before its layers: two norms and the product that joins both
        states."""
        self.unit = unit = Unit()
        self.norm()
        self.norm()
        self.linear("projections", self.hidden // self.tp, 2 * self.hidden)
        return unit

    def dense(self, block: Dense, part: str, *, shard: bool = True, gather: bool = True) -> None:
        inter = block.inter // self.tp if shard else block.inter
        if not inter:
            raise KernelcastError(f"tp {self.tp} cannot shard an MLP of width {block.inter}")
        joined = self.joins or not block.gated
        self.linear(part, block.up_width // block.inter * inter if joined else inter, self.hidden, target="fc1",
                    count=1.0 if joined else 2.0, launches=1.0 if joined else 2.0, gather=gather, bias=block.bias,
                    behind_norm=True)  # fmt: skip
        self.fork(1 if joined else 2)
        with self.module("mlp_act" if part == "mlp" else "shared_experts"):
            self.activation(part, self.tokens, inter, block.gated, name=block.activation)
        self.linear(part, self.hidden, inter, target="fc2", column=False, gather=gather, bias=block.bias)

    # ---- mixers ----

    def mixer(self, mixer: Mixer) -> None:
        if isinstance(mixer, SelfAttention):
            self.attention(mixer)
        elif isinstance(mixer, LatentAttention):
            self.latent(mixer)
        elif isinstance(mixer, Parallel):
            self.attention(mixer.attention)
            self.scan(mixer.recurrent)
        elif isinstance(mixer, LinearAttention | Kda | Mamba2):
            self.scan(mixer)
        elif isinstance(mixer, CompressedAttention):
            self.compressed(mixer)
        else:
            raise KernelcastError(f"{type(mixer).__name__} of {self.model.name} has no training kernels here")

    def attention(self, mixer: SelfAttention) -> None:
        heads, kv_heads, dim = mixer.q_heads // self.tp, max(1, mixer.kv_heads // self.tp), mixer.head_dim
        kept = 0 if mixer.shares_kv else 1 if mixer.values_are_keys else 2
        query = heads * dim * (2 if mixer.output_gate else 1)
        bias = mixer.qkv_bias
        if self.joins:
            self.linear("projections", query + kept * kv_heads * dim, self.hidden, target="qkv", bias=bias,
                        behind_norm=True)  # fmt: skip
        else:
            self.linear("projections", query, self.hidden, target="qkv", behind_norm=True, bias=bias)
            if kept:
                self.linear("projections", kv_heads * dim, self.hidden, target="qkv", count=kept, launches=kept,
                            gather=False, bias=bias)  # fmt: skip
            self.fork(1 + kept)
        self._heads(mixer, heads, 0 if mixer.shares_kv else kv_heads)
        with self.module("core_attn"):
            window = mixer.window or 0
            self.core(heads, kv_heads, dim, dim, window, mixer.chunked)
        if mixer.output_gate:
            self.vector("activation", self.tokens, heads * dim, (3.0, 5.0))
        self.linear("projections", self.hidden, heads * dim, target="proj", column=False,
                    bias=mixer.out_bias)  # fmt: skip

    def _heads(self, mixer: SelfAttention, heads: int, kv_heads: int) -> None:
        """Norms and rotations of queries and keys: one kernel for both, or each their own."""
        dim = mixer.head_dim
        if not self.stack.kernels:
            width = (heads + kv_heads) * dim
            if mixer.qk_norm != "none":
                self.norm(self.tokens, width)
            if mixer.rope:
                self.vector("rotary", self.tokens, width, _ROPE[self.stack.fused_rope])
            return
        for count in filter(None, (heads, kv_heads)):
            if mixer.qk_norm != "none":
                self.norm(self.tokens * count, dim, self.norm_op)
            if mixer.rope:
                self.vector("rotary", self.tokens * count, dim, _ROPE[False], "rope", half=max(1, dim // 2))

    def latent(self, mixer: LatentAttention) -> None:
        """Down projections are replicated, up projections sharded by heads; heads are expanded in training."""
        heads = mixer.q_heads // self.tp
        query, rank = heads * mixer.qk_head_dim, mixer.q_lora_rank
        down, rows = mixer.kv_lora_rank + mixer.qk_rope_head_dim, self.outside
        if rank is None:
            self.linear("projections", query, self.hidden, target="qkv")
        else:
            self.linear("projections", rank, self.hidden, rows=rows, target="qkv", gather=False)
        self.linear("projections", down, self.hidden, rows=rows, target="qkv", gather=False)
        self.norm(rows, (rank or 0) + mixer.kv_lora_rank)
        with self.module("mla_up_proj"):
            if rank is not None:
                self.linear("projections", query, rank, gather=False)
            self.linear("projections", heads * (mixer.qk_nope_head_dim + mixer.v_head_dim), mixer.kv_lora_rank,
                        gather=False)  # fmt: skip
            if self.apart:  # latents of all tokens, far narrower than the hidden state
                size = self.tokens * ((rank or 0) + down) * self.width_bytes
                self._exchange("forward", "all_gather", size)
                self._exchange("backward", "reduce_scatter", size)
            self.vector("rotary", self.tokens, heads * (mixer.qk_head_dim + mixer.qk_nope_head_dim),
                        _ROPE[self.stack.fused_rope])  # fmt: skip
        with self.module("core_attn"):
            self.core(heads, heads, mixer.qk_head_dim, mixer.v_head_dim, 0, False)
        self.linear("projections", self.hidden, heads * mixer.v_head_dim, target="proj", column=False)

    def compressed(self, mixer: CompressedAttention) -> None:
        """DeepSeek-V4: low-rank queries, one key-value head, a window and compressed keys, grouped output."""
        heads, dim = mixer.q_heads // self.tp, mixer.head_dim
        self.linear("projections", mixer.q_lora_rank + dim, self.hidden, rows=self.outside, gather=False)
        self.norm(self.outside, mixer.q_lora_rank + dim)
        self.linear("projections", heads * dim, mixer.q_lora_rank, gather=False)
        self.vector("rotary", self.tokens, heads * mixer.rope_dim, _ROPE[self.stack.fused_rope])
        with self.module("core_attn"):
            self.core(heads, 1, dim, dim, mixer.window, False)
            if mixer.ratio:
                keys = max(1, self.length // mixer.ratio)
                seen = min(keys, mixer.indexer.topk) if mixer.indexer else max(1, keys // 2)  # of causal ones the half
                self.attend(heads, 1, dim, dim, 1.0, self.rank_length, seen, False)
        self.linear("projections", mixer.o_lora_rank * mixer.o_groups // self.tp, heads * dim // mixer.o_groups,
                    count=1.0, gather=False)  # fmt: skip
        self.linear("projections", self.hidden, mixer.o_lora_rank * mixer.o_groups // self.tp, column=False)

    @property
    def length(self) -> int:
        """Tokens that attend to one another: of a sequence, or of one that is packed with others."""
        return min(self.job.mean_length or self.job.seq, self.job.seq) if self.job.packed else self.job.seq

    @property
    def rank_length(self) -> int:
        return max(1, self.length // self.cp)

    def attend(self, heads: float, kv_heads: int, dim: int, value_dim: int, batch: float, queries: int, keys: int,
               causal: bool, times: float = 1.0) -> tuple[Kernel, Kernel]:  # fmt: skip
        """Attention and its gradient; ``batch``: sequences over those of the micro-batch."""
        sequences = max(1, round(self.job.micro_batch * self.job.seq / self.length * batch))
        given: dict[str, Any] = {
            "batch": sequences, "q_len": queries, "kv_len": keys, "q_heads": max(1, round(heads)),
            "kv_heads": kv_heads, "head_dim": dim, "causal": causal,
            "dtype": self.vectors, **self._backend(),
        }  # fmt: skip
        forward, backward = (slower * times * (dim + value_dim) / (2 * dim) for slower in self.stack.attention_slowdown)
        if self.formats.attention == "fp8":
            forward, backward = forward / FP8_ATTENTION, backward / FP8_ATTENTION
        if self.stack.kernels:
            return self._eager_attention(given, forward, backward, times)
        call = Call.of("attention", given)
        # five products for two: scores again, and gradients of values, of scores, of queries and of keys
        flops = (3 * dim + 2 * value_dim) / (dim + value_dim)
        longer = flops / (BACKWARD_RATE if dim <= value_dim else WIDE_KEYS_RATE)
        return (self.run("attention", call, forward, times), self.back("attention", call, backward * longer, 3.0))

    def _eager_attention(self, given: dict[str, Any], forward: float, backward: float, times: float
                         ) -> tuple[Kernel, Kernel]:  # fmt: skip
        """As scaled_dot_product_attention runs it: other kernels with dropout, and in fp32."""
        op = "attention"
        if given["stack"] == "torch" and ("attention" in self.drops or self.vectors == "fp32"):
            op, given = "masked_attention", {**given, "bias": "none", "dropout": "attention" in self.drops}
        gradient = Call.of(f"{op}_backward", {**given, "stack": "torch"})
        return (self.run("attention", Call.of(op, given), forward, times),
                self.back("attention", gradient, backward, times))  # fmt: skip

    def _backend(self) -> dict[str, str | None]:
        """cuDNN's kernels were measured on Hopper by PyTorch; on Blackwell TensorRT-LLM's, which reach as much, are."""
        chosen = self.stack.attention_backend
        if chosen == "sdpa":  # FlashAttention-2 before Blackwell, cuDNN there
            chosen = "cudnn" if self.gpu.instruction_path == TCGEN05 else "fa2"
        if self.vectors == "fp32":
            return {"stack": "torch", "backend": None}
        if chosen == "cudnn" and self.gpu.instruction_path == TCGEN05:
            return {"stack": "sglang", "backend": None}
        if chosen == "cudnn" and self.gpu.instruction_path != WGMMA:
            chosen = "fa2"
        return {"stack": "torch", "backend": chosen}

    def core(self, heads: int, kv_heads: int, dim: int, value_dim: int, window: int, chunked: bool) -> None:
        """Scores and values. A window is blocks of queries that see two of keys; with context parallelism each rank
        has an early and a late part of every sequence, so that causal work is balanced."""
        length, cp = self.length, self.cp
        if window and window < length:
            if chunked:
                self.attend(heads, kv_heads, dim, value_dim, length / window / cp, window, window, True)
            else:
                self.attend(heads, kv_heads, dim, value_dim, length / window / cp, window, 2 * window, True)
            return
        causal = self.model.kind == "decoder"
        if cp == 1 or self.job.packed:
            self.attend(heads, kv_heads, dim, value_dim, 1.0 / cp, length, length, causal)
            return
        queries = length // cp
        keys_bytes = 2 * self.tokens * kv_heads * dim * self.width_bytes  # of this rank, keys and values
        group = self.layout.group("cp")
        if self.layout.cp_comm == "a2a":
            own = self.attend(max(1, heads / cp), max(1, kv_heads // cp), dim, value_dim, 1.0, length, length, causal)
            del own
            for width in (heads + 2 * kv_heads, heads):
                size = self.tokens * width * dim * self.width_bytes
                for name in ("forward", "backward"):
                    self._exchange(name, "all_to_all", size, part=CONTEXT, group=group)
            return
        if self.layout.cp_comm == "all_gather":
            self.attend(heads, kv_heads, dim, value_dim, 2.0, queries // 2, length // 2 + queries // 2, False)
            self._exchange("forward", "all_gather", keys_bytes * cp, part=CONTEXT, group=group)
            self._exchange("backward", "all_gather", keys_bytes * cp, part=CONTEXT, group=group)
            self._exchange("backward", "reduce_scatter", keys_bytes * cp, part=CONTEXT, group=group)
            return
        self.ring(heads, kv_heads, dim, value_dim, queries, causal, keys_bytes)

    def ring(self, heads: int, kv_heads: int, dim: int, value_dim: int, queries: int, causal: bool,
             keys_bytes: float) -> None:  # fmt: skip
        """Keys and values go round while each step attends to what has come; a step's output is joined to the sum. In
        the backward pass their gradients go round too."""
        cp = self.cp
        first = self.attend(heads, kv_heads, dim, value_dim, 1.0, queries, queries, causal)
        keys = queries // 2 if causal else queries
        others = self.attend(heads, kv_heads, dim, value_dim, 1.0, queries, keys, False, times=cp - 1.0)
        call, count = self.moved(self.tokens, heads * value_dim, 3.0 * (cp - 1) * (0.75 if causal else 1.0))
        self.run("attention", call, count, cp - 1.0)
        self.back("attention", call, count, cp - 1.0)
        group = self.layout.group("cp")
        for name, at, size in (("forward", 0, keys_bytes), ("backward", 1, 2 * keys_bytes)):
            steps = tuple(group.neighbour(size, self.vectors, self.gpu)) * (cp - 1)
            self._send(name, CONTEXT, steps, (first[at], others[at]), 0)

    def scan(self, mixer: LinearAttention | Kda | Mamba2) -> None:
        """State-space and delta-rule mixers: projections, a short convolution with gates, and the scan."""
        tp = self.tp
        given: dict[str, Any] = {"batch": self.job.micro_batch, "q_len": self.job.seq // self.cp,
                                 "dtype": self.vectors, "stack": "torch"}  # fmt: skip
        if isinstance(mixer, LinearAttention):
            width, op = mixer.value_width // tp, "gated_delta"
            given |= {"key_heads": mixer.key_heads // tp, "value_heads": mixer.value_heads // tp, "qk_norm": True,
                      "key_dim": mixer.key_head_dim, "value_dim": mixer.value_head_dim}  # fmt: skip
        elif isinstance(mixer, Kda):
            width, op = mixer.width // tp, "kda"
            given |= {"heads": mixer.heads // tp, "key_dim": mixer.head_dim}
        else:
            width, op = mixer.width // tp, "mamba2"
            given |= {"heads": mixer.heads // tp, "head_dim": mixer.head_dim, "state": mixer.state,
                      "groups": max(1, mixer.groups // tp), "chunk": mixer.chunk}  # fmt: skip
        self.linear("projections", mixer.in_width // tp, self.hidden, target="qkv")
        self.vector("activation", self.tokens, mixer.conv_channels // tp, (4.0, 7.0))
        call = Call.of(op, given)
        self.run("scan", call)
        self.back("scan", call, BACKWARD_SCAN, 3.0)
        self.norm(self.tokens, width)
        self.linear("projections", self.hidden, width, target="proj", column=False)

    # ---- experts ----

    def experts(self, block: Experts) -> None:
        """Router, dispatch, the products of this rank's experts, combine; shared experts beside them."""
        layout, width = self.layout, block.width(self.hidden)
        rows = self.tokens / self.tp if layout.tp > 1 else self.tokens  # tokens that this rank routes
        self.linear("router", block.experts, self.hidden, rows=rows, narrow=False, gather=False)
        self.vector("router", rows, block.experts, (6.0, 6.0), "router", topk=block.topk)  # scores, top-k, in fp32
        if block.latent:
            self.linear("experts", width, self.hidden, rows=rows, gather=False)
        shard = layout.expert_tp
        pairs = rows * block.topk * shard  # rows of this rank's experts, with balanced loads
        permutes = _PERMUTATION[self.stack.token_permutation_fused]
        if self.job.dispatcher == "hybridep" and layout.ep > 1:  # written in the order of experts by the exchange
            permutes = (permutes[0] / 2, permutes[1] / 2)
        self._dispatch(block, rows, width)
        self.unit.syncs += 1  # loads of experts decide sizes of what follows
        sizes = {
            "tokens": max(1, round(rows * shard)),
            "topk": block.topk,
            "whole": max(1, round(rows * shard * width)),
        }
        self.vector("permutation", pairs, width, permutes, "dispatch", **sizes)
        local = block.experts // layout.ep
        each, inter = pairs / local * self.job.imbalance(block), max(1, block.inter // shard)
        launches = float(local) * (LOOP if self.stack.grouped_gemm else 1.0)
        up = inter * (2 if block.gated else 1)
        if "experts" in self.stack.kernels and self.vectors != "fp32":  # which has no grouped product
            self._grouped(up, width, pairs, local)
            with self.module("moe_act"):
                if block.bias:
                    self.activation("experts", pairs, inter, block.gated, clamped=True)
                else:
                    self.vector("experts", pairs, inter, (6.0, 6.0), "experts", up=up)
            self._grouped(width, inter, pairs, local)
        else:
            self.linear("experts", up, width, rows=max(1.0, each), target="fc1", count=local, launches=launches,
                        gather=False, inner=True)  # fmt: skip
            with self.module("moe_act"):
                if not self.stack.fused_experts:  # else part of the products, with the bias
                    self.activation("experts", pairs, inter, block.gated, block.bias, block.activation)
            self.linear("experts", width, inter, rows=max(1.0, each), target="fc2", count=local, launches=launches,
                        column=False, gather=False, inner=True)  # fmt: skip
        for cols in (up, width) if block.bias and not self.stack.fused_experts else ():
            self.vector("experts", pairs, cols, _EXPERT_BIAS)
        self.vector("permutation", pairs, width, permutes, "combine", **sizes)
        if block.latent:
            self.linear("experts", self.hidden, width, rows=rows, gather=False)
        if block.shared:
            with self.module("shared_experts"):
                self.dense(block.shared, "shared experts")
            self.vector("residual", self.outside, self.hidden, (3.0, 2.0))

    def _grouped(self, n: int, k: int, pairs: float, groups: int) -> None:
        """Products of all experts of this rank, torch._grouped_mm."""
        self.unit.linears += 1
        self.unit.tensors += not self.adapted
        sizes = {"rows": max(1, round(pairs)), "groups": groups, "dtype": self.vectors, "stack": "torch"}
        self.run("experts", Call.of("grouped_mm", {**sizes, "n": n, "k": k, "layout": "tn"}))
        self.back("experts", Call.of("grouped_mm", {**sizes, "n": k, "k": n, "layout": "nn"}))
        if not self.adapted:
            weights = Call.of("grouped_mm", {**sizes, "n": k, "k": n, "layout": "nt"})
            self.back("experts", weights, weight=True)
            self._accumulate("experts", n, k, groups)

    def _dispatch(self, block: Experts, rows: float, width: int) -> None:
        """Tokens to the ranks of their experts, and results back; the gradients go the same ways."""
        layout, world = self.layout, self.layout.ep
        if layout.expert_tp > 1:  # the ranks that share an expert have all of its tokens
            size = rows * block.topk * layout.expert_tp * width * self.width_bytes
            group = layout.group("expert_tp")
            for name in ("forward", "backward"):
                for op in ("all_gather", "reduce_scatter"):
                    self._exchange(name, op, size, part=EXPERT, group=group)
        if world == 1:
            return
        group, tokens = layout.group("experts"), max(1, round(rows))
        dispatcher = self.job.dispatcher
        if dispatcher != "deepep":  # HybridEP sends a token once to each rank, and sorts it by expert on the way
            reached = block.topk if dispatcher == "alltoall" else world * (1 - (1 - 1 / world) ** block.topk)
            size = rows * reached * width * self.width_bytes
            calls = [tuple(group.launches("all_to_all", size, self.vectors, self.gpu))] * 2
        else:
            nodes = group.nodes(self.gpu)
            given = {"tokens": tokens, "hidden": width, "topk": min(block.topk, block.experts),
                     "experts": block.experts, "world": world, "stack": "sglang", "dtype": "bf16",
                     "nodes": nodes, "fabric": layout.between_nodes if nodes > 1 else None}  # fmt: skip
            calls = [(Launch("communication", Call.of(f"deepep_{what}", given)),) for what in ("dispatch", "combine")]
        for name in ("forward", "backward"):
            for launches in calls:
                self._send(name, EXPERT, launches)
