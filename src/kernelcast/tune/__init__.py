"""The best Triton config of a (grouped) GEMM: all predicted, a few measured."""
