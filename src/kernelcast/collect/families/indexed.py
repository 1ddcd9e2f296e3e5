"""Ops by an index: recommendation models, graph networks, routers of experts, sorting; and random ones between."""

from __future__ import annotations

from kernelcast.collect.sampling import Draw, Drawn, Table

_MOST_TABLE_BYTES = 2**32
_MOST_ELEMENTS = 2**27
_GRAPH_FEATURES = (16, 32, 47, 64, 64, 100, 128, 128, 256)


def _bag(draw: Draw, op: str) -> Drawn:
    hidden = draw.pick((1, 8, 16, 32, 64, 64, 128, 128, 96, 256))
    dtype = draw.pick(("fp32", "fp32", "fp32", "bf16", "fp16"))
    vocab = draw.size(100, 10_000_000)
    vocab = min(vocab, _MOST_TABLE_BYTES // (hidden * 4) // (4 if op.endswith("backward") else 1))
    pooling = draw.pick((1, 1, 10, 20, 100)) if draw.chance(0.5) else draw.size(1, 128)
    bags = (
        draw.pick((256, 512, 1024, 2048, 4096, 8192, 16384))
        if draw.chance(0.5)
        else draw.size(16, 400_000 if pooling == 1 else 65536)
    )
    bags = max(1, min(bags, 4_000_000 // pooling))
    return {"op": op, "bags": bags, "pooling": pooling, "hidden": hidden, "vocab": vocab,
            "mode": draw.pick(("sum", "sum", "mean")), "dtype": dtype, "stack": "torch"}  # fmt: skip


def _graph(draw: Draw) -> tuple[int, int, int]:
    """(edges, features, nodes)"""
    cols = draw.pick(_GRAPH_FEATURES) if draw.chance(0.7) else draw.size(1, 1024)
    nodes = draw.size(1000, 2_500_000)
    rows = int(nodes * draw.pick((1, 2, 5, 14, 50))) if draw.chance(0.6) else draw.size(1000, 10_000_000)
    nodes, rows = min(nodes, _MOST_ELEMENTS // cols), min(rows, _MOST_ELEMENTS // cols)
    return rows, cols, nodes


def _rows(draw: Draw) -> tuple[int, int, int]:
    """(rows named, features, rows): edges of a graph, tokens of a batch, or any."""
    if draw.chance(0.6):
        return _graph(draw)
    cols = draw.model().hidden if draw.chance(0.5) else draw.size(1, 8192, draw.pick((1, 8)))
    most = max(1, 2**26 // cols)
    return min(draw.tokens(65536), most), cols, min(draw.size(1, 65536), most)


def _by_row(draw: Draw) -> Drawn:
    op = draw.pick(("index", "index_add", "index_add", "index_put", "index_put"))
    rows, cols, places = _rows(draw)
    call = {"op": op, "rows": rows, "cols": cols, "size": places, "dtype": draw.pick(("fp32", "fp32", "bf16", "fp16")),
            "stack": "torch"}  # fmt: skip
    if op == "index":
        return call | {"indices": draw.pick((1, 1, 2, 3))}
    return call | {"accumulate": draw.chance(0.6)} if op == "index_put" else call


def _by_element(draw: Draw) -> Drawn:
    op = draw.pick(("gather_elements", "gather_elements", "scatter", "scatter_add", "scatter_add"))
    call = {"op": op, "dtype": draw.pick(("fp32", "fp32", "bf16", "fp16")), "stack": "torch"}
    if draw.chance(0.5):  # messages: the index of an edge for all features
        rows, cols, places = _graph(draw)
        return call | {"rows": rows, "cols": cols, "size": places, "axis": "rows", "expanded": draw.chance(0.8)}
    rows = draw.size(16, 262144) if draw.chance(0.6) else draw.tokens(65536)
    cols = draw.pick((1, 1, 2, 4, 8, 8)) if draw.chance(0.5) else draw.size(1, 4096)
    places = draw.pick((8, 64, 128, 256, 1000)) if draw.chance(0.4) else draw.size(2, 131072)
    rows = max(1, min(rows, 2**25 // max(cols, places)))
    return call | {"rows": rows, "cols": cols, "size": places, "axis": "cols"}


def _sorted(draw: Draw) -> Drawn:
    keys = draw.pick((None, None, "int64", "int64", "int32"))
    rows, cols = _searched(draw)
    call = {"op": "sort", "rows": rows, "cols": cols, "dtype": draw.pick(("fp32", "fp32", "bf16", "fp16")),
            "stack": "torch"}  # fmt: skip
    return call | {"keys": keys, "dtype": "fp32"} if keys else call


def _searched(draw: Draw) -> tuple[int, int]:
    """Rows and columns to sort: one long row, scores of classes, boxes or tokens, any."""
    if draw.chance(0.35):
        return 1, draw.size(16, 20_000_000)
    cols = draw.pick((8, 32, 64, 100, 128, 256, 300, 1000, 1000, 4096, 8400, 21841, 32000, 128256))
    cols = cols if draw.chance(0.5) else draw.size(2, 200_000)
    rows = draw.tokens(65536) if draw.chance(0.5) else draw.size(1, 65536)
    return max(1, min(rows, 2**24 // cols)), cols


def _largest(draw: Draw) -> Drawn:
    rows, cols = _searched(draw)
    k = draw.pick((1, 1, 2, 4, 5, 8, 8, 10, 50, 100, 300, 1000)) if draw.chance(0.8) else draw.size(1, 4096)
    return {"op": "topk", "rows": rows, "cols": cols, "k": min(k, cols),
            "dtype": draw.pick(("fp32", "fp32", "bf16", "fp16")), "stack": "torch"}  # fmt: skip


def _counted(draw: Draw) -> Drawn:
    if draw.chance(0.5):
        return {"op": "searchsorted", "elements": draw.size(1000, 2**26), "boundaries": draw.size(2, 100_000),
                "dtype": "fp32", "stack": "torch"}  # fmt: skip
    return {"op": "histogram", "elements": draw.size(100, 2**26), "bins": draw.pick((8, 64, 128, 256, 100, 1000)),
            "dtype": "fp32", "stack": "torch"}  # fmt: skip


TABLE: Table = {
    "embedding-bag": (lambda draw: _bag(draw, "embedding_bag"), 5),
    "embedding-bag-backward": (lambda draw: _bag(draw, "embedding_bag_backward"), 4),
    "by-row": (_by_row, 7),
    "by-element": (_by_element, 6),
    "sort": (_sorted, 4.5),
    "topk": (_largest, 4.5),
    "counted": (_counted, 1),
}
