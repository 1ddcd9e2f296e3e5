"""Traces: every layout, every bad row by its line, and what skipping leaves."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import pytest

from kernelcast.errors import KernelcastError
from kernelcast.inference.request_files import read_requests
from kernelcast.serving.traces import TRACE_FORMATS, read_trace


def file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def write_parquet(path: Path, query: str) -> None:
    duckdb.execute(f"COPY ({query}) TO '{path}' (FORMAT parquet)")


def said(path: Path, layout: str = "", **words: int) -> str:
    with pytest.raises(KernelcastError) as caught:
        read_trace(path, layout, **words)  # type: ignore[arg-type]
    line = str(caught.value)
    assert "\n" not in line and str(path) in line
    return line.replace(str(path), path.name)


# ---- layouts ----


def test_our_own_layout_in_csv_jsonl_and_parquet(tmp_path: Path) -> None:
    csv = file(tmp_path, "t.csv", "request_id,arrival_s,input_tokens,output_tokens\na,0.5,10,2\nb,1,20,3\n")
    jsonl = file(
        tmp_path,
        "t.jsonl",
        '{"request_id": "a", "arrival_s": 0.5, "input_tokens": 10, "output_tokens": 2}\n'
        '{"request_id": "b", "arrival_s": 1, "input_tokens": 20, "output_tokens": 3}\n',
    )
    parquet = tmp_path / "t.parquet"
    write_parquet(parquet, f"SELECT * FROM '{csv}'")
    for path in (csv, jsonl, parquet):
        trace = read_trace(path)
        load = trace.load(max_concurrency=3)
        assert (trace.layout, load.ids, load.max_concurrency) == ("kernelcast", ("a", "b"), 3)
        assert load.arrivals_s.tolist() == [0.5, 1]  # as written: the clock is the file's
        assert (load.inputs.tolist(), load.outputs.tolist(), load.shared) == ([10, 20], [2, 3], ())
        assert trace.problems() == ""


def test_names_of_other_simulators(tmp_path: Path) -> None:
    path = file(tmp_path, "s.csv", "request_id,input_toks,output_toks,arrival_s\nbench-0,5,2,0\n")
    assert read_trace(path).load().inputs.tolist() == [5]
    path = file(tmp_path, "v.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n0.25,5,2\n")
    trace = read_trace(path)
    assert trace.layout == "vidur" and trace.load().arrivals_s.tolist() == [0.25]


def test_azure_counts_seconds_from_the_first(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        "azure.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n2023-11-17 18:15:46.6805900,879,55\n",
    )
    trace = read_trace(path)
    assert trace.layout == "azure"
    assert trace.load().arrivals_s == pytest.approx([0, 4.314579, 86400])
    newer = file(  # 2024's have an offset
        tmp_path,
        "newer.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01.5+00:00,9,1\n",
    )
    assert read_trace(newer).load().arrivals_s == pytest.approx([0, 1.49007])


def test_mooncake_has_milliseconds_and_blocks_of_512_tokens(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        "mooncake.jsonl",
        '{"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [46, 47, 48]}\n'
        '{"timestamp": 3052, "input_length": 1024, "output_length": 26, "hash_ids": [46, 99]}\n'
        '{"timestamp": 3052, "input_length": 100, "output_length": 1, "hash_ids": []}\n',
    )
    trace = read_trace(path)
    load = trace.load()
    assert trace.layout == "mooncake" and load.arrivals_s.tolist() == [0, 3.052, 3.052]
    assert load.shared == (((0, 512), (1, 512), (2, 76)), ((0, 512), (3, 512)), ())
    csv = file(tmp_path, "m.csv", 'timestamp,input_length,output_length,hash_ids\n0,600,1,"[1, 2]"\n')
    assert read_trace(csv).load().shared == (((0, 512), (1, 88)),)
    plain = file(tmp_path, "p.jsonl", '{"timestamp": 5, "input_length": 6, "output_length": 7}\n')
    assert read_trace(plain).load().shared == ()


def test_burstgpt_has_failures(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        "BurstGPT_1.csv",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,API log\n118,GPT-4,417,276,693,API log\n",
    )
    assert "line 3: Response tokens must be a whole number of tokens from 1 on, not 0; `skip_bad`" in said(path)
    trace = read_trace(path, skip_bad=True)
    assert trace.layout == "burstgpt" and trace.load().arrivals_s.tolist() == [0, 113]
    assert trace.problems().startswith("1 row left out (1 x Response tokens must be")


def test_prefixes_and_sessions_of_our_layout(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        "t.csv",
        "arrival_s,input_tokens,output_tokens,prefix_id,prefix_tokens,session_id\n"
        "0,100,5,sys,60,u1\n1,80,5,sys,60,\n2,120,5,sys,60,u1\n3,50,5,,,\n4,70,5,,,u2\n",
    )
    shared = read_trace(path).load().shared
    assert shared == (((0, 60), (1, 40)), ((0, 60),), ((0, 60), (1, 60)), (), ((2, 70),))


def test_a_file_without_times_is_sent_at_other_times(tmp_path: Path) -> None:
    path = file(tmp_path, "t.csv", "input_tokens,output_tokens\n10,1\n20,2\n")
    trace = read_trace(path)
    with pytest.raises(KernelcastError, match="has no arrival_s: give `request_rate`"):
        trace.load()
    load = trace.load_at(np.array([0.0, 1.0, 2.0]))
    assert load.inputs.tolist() == [10, 20, 10]


def test_prompts_as_text_need_a_tokenizer(tmp_path: Path) -> None:
    assert "only the model's tokenizer knows" in said(file(tmp_path, "c.jsonl", '{"prompt": "What is it?"}\n'))
    sharegpt = file(tmp_path, "s.json", '[{"id": "1", "conversations": [{"from": "human", "value": "hi"}]}]')
    assert "tokenizer knows the lengths" in said(sharegpt)
    counted = file(tmp_path, "d.jsonl", '{"prompt": "What?", "input_tokens": 3, "output_tokens": 4}\n')
    assert read_trace(counted).inputs.tolist() == [3]


def test_a_layout_may_be_named(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        "both.csv",
        "arrival_s,input_tokens,output_tokens,timestamp,input_length,output_length\n1,2,3,4000,5,6\n",
    )
    assert read_trace(path).load().inputs.tolist() == [2]
    named = read_trace(path, "mooncake").load()
    assert (named.inputs.tolist(), named.arrivals_s.tolist()) == ([5], [4])
    assert "layout azure has columns ContextTokens, GeneratedTokens; not arrival_s" in said(path, "azure")
    with pytest.raises(KernelcastError, match=r"unknown layout of a trace 'azur' \(did you mean azure"):
        read_trace(path, "azur")
    assert set(TRACE_FORMATS) == {"kernelcast", "azure", "mooncake", "burstgpt", "vidur"}


# ---- bad rows ----

HEADER = "arrival_s,input_tokens,output_tokens\n"
BAD = {
    "1,0,5": "line 3: input_tokens must be a whole number of tokens from 1 on, not 0",
    "1,5,0": "line 3: output_tokens must be a whole number of tokens from 1 on, not 0",
    "1,-5,5": "line 3: input_tokens must be a whole number of tokens from 1 on, not -5",
    "1,2.5,5": "line 3: input_tokens must be a whole number of tokens from 1 on, not 2.5",
    "1,many,5": "line 3: input_tokens must be a whole number of tokens from 1 on, not 'many'",
    "1,,5": "line 3: input_tokens must be a whole number of tokens from 1 on, not an empty cell",
    "1,nan,5": "line 3: input_tokens must be",
    "1,inf,5": "line 3: input_tokens must be",
    "soon,5,5": "line 3: arrival_s must be seconds from 0 on, not 'soon'",
    "-1,5,5": "line 3: arrival_s must be seconds from 0 on, not -1",
    ",5,5": "line 3: arrival_s must be seconds from 0 on, not an empty cell",
    "1,90,20": "line 3: prompt and answer are longer than 100 tokens",
}


@pytest.mark.parametrize("row", BAD)
def test_a_bad_row_is_named_by_its_line_or_skipped_and_counted(tmp_path: Path, row: str) -> None:
    path = file(tmp_path, "t.csv", f"{HEADER}0,10,5\n{row}\n2,10,5\n{row}\n3,11,5\n")
    assert BAD[row] in said(path, max_context=100)
    trace = read_trace(path, skip_bad=True, max_context=100)
    assert trace.inputs.tolist() == [10, 10, 11]
    (count,) = trace.skipped.values()
    assert count == 2 and trace.problems().startswith("2 rows left out (2 x ")


def test_a_line_counts_blank_ones_and_a_cell_may_have_several(tmp_path: Path) -> None:
    path = file(tmp_path, "t.csv", f'note,{HEADER}\n\n"two\nlines",0,10,5\n\nx,1,0,5\n')
    assert "line 7: input_tokens" in said(path)
    jsonl = file(
        tmp_path,
        "t.jsonl",
        '{"arrival_s": 0, "input_tokens": 1, "output_tokens": 1}\n\n'
        '{"arrival_s": 1, "input_tokens": 0, "output_tokens": 1}\n',
    )
    assert "line 3: input_tokens" in said(jsonl)


def test_a_parquet_file_has_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_parquet(path, "SELECT * FROM (VALUES (0.0, 5, 5), (1.0, 5, 0)) AS t(arrival_s, input_tokens, output_tokens)")
    assert "row 2: output_tokens" in said(path)


def test_times_out_of_order_are_an_error_or_sorted(tmp_path: Path) -> None:
    path = file(tmp_path, "t.csv", f"{HEADER}0,1,5\n5,2,5\n3,3,5\n4,4,5\n6,5,5\n")
    assert "line 4: this request arrives 2 s before the one in front of it; `skip_bad` sorts them" in said(path)
    trace = read_trace(path, skip_bad=True)
    assert trace.inputs.tolist() == [1, 3, 4, 2, 5]
    assert (trace.moved, trace.problems()) == (2, "2 rows put in order of arrival")


def test_lines_that_are_no_rows(tmp_path: Path) -> None:
    csv = file(tmp_path, "t.csv", f"{HEADER}0,1,5\n1,2\n2,3,5,9\n3,4,5\n")
    assert "Line: 3" in said(csv)
    trace = read_trace(csv, skip_bad=True)
    assert trace.inputs.tolist() == [1, 4] and trace.skipped == {"not readable as a row": 2}
    good = '{"arrival_s": 0, "input_tokens": 1, "output_tokens": 1}\n'
    jsonl = file(tmp_path, "t.jsonl", good + '{"arrival_s": 1, "inp\n' + good)
    assert "line 2 is not JSON" in said(jsonl)
    assert read_trace(jsonl, skip_bad=True).skipped == {"not readable as a row": 1}


def test_a_file_that_skipping_does_not_mend(tmp_path: Path) -> None:
    twice = file(tmp_path, "t.csv", "input_tokens,input_tokens,output_tokens\n1,2,3\n")
    assert "more than one column is called input_tokens" in said(twice, skip_bad=True)
    quote = file(tmp_path, "q.csv", f'note,{HEADER}"never closed,0,1,5\nx,1,2,5\ny,2,3,5\n')
    assert "line 2: unexpected end of data" in said(quote, skip_bad=True)  # how many rows it swallowed is not known


def test_files_of_no_use(tmp_path: Path) -> None:
    assert "needs columns input_tokens and output_tokens, and arrival_s, or those of azure" in said(
        file(tmp_path, "a.csv", "arrival_s,tokens\n0,1\n")
    )
    assert "has no request" in said(file(tmp_path, "b.csv", HEADER))
    assert "is empty" in said(file(tmp_path, "c.csv", ""))
    assert "no file" in said(tmp_path / "d.csv")
    assert "one of .csv" in said(file(tmp_path, "e.txt", HEADER))
    none = file(tmp_path, "f.csv", f"{HEADER}0,0,5\n1,0,5\n")
    with pytest.raises(KernelcastError, match="no row is left: 2 x input_tokens"):
        read_trace(none, skip_bad=True)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("1,50,5,sys,60", "prefix_tokens must be a whole number from 1 on, within the prompt, not 60"),
        ("1,50,5,sys,", "prefix_tokens must be"),
        ("1,50,5,sys,0", "prefix_tokens must be"),
    ],
)
def test_bad_prefixes(tmp_path: Path, row: str, expected: str) -> None:
    path = file(tmp_path, "t.csv", f"arrival_s,input_tokens,output_tokens,prefix_id,prefix_tokens\n0,50,5,,\n{row}\n")
    assert f"line 3: {expected}" in said(path)
    assert read_trace(path, skip_bad=True).inputs.tolist() == [50]


def test_a_prefix_needs_its_tokens(tmp_path: Path) -> None:
    path = file(tmp_path, "t.csv", "arrival_s,input_tokens,output_tokens,prefix_id\n0,50,5,a\n")
    assert "prefix_id and prefix_tokens are given together" in said(path)


@pytest.mark.parametrize("blocks", ['"x"', "[1, 2, 3]", '{"a": 1}'])
def test_bad_blocks(tmp_path: Path, blocks: str) -> None:
    row = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
    path = file(tmp_path, "t.jsonl", row + row.replace("[1, 2]", blocks))
    assert "line 2: hash_ids must be a list of ids, one a block of 512 tokens" in said(path)
    assert read_trace(path, skip_bad=True).inputs.tolist() == [600]


def test_a_million_rows_take_seconds(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    columns = "i / 100.0 AS arrival_s, 1 + i % 4000 AS input_tokens, 1 + i % 500 AS output_tokens"
    write_parquet(path, f"SELECT {columns} FROM range(1000000) AS t(i)")
    load = read_trace(path).load()
    assert len(load) == 1_000_000 and load.request_rate == pytest.approx(100)


def test_a_static_batch_reads_numbers_alike(tmp_path: Path) -> None:
    path = file(tmp_path, "r.csv", "input_tokens,output_tokens,cached_tokens,arrival_s\n10,5,0,3\n20,6,4,1\n")
    found = read_requests(path)
    assert (found.inputs, found.outputs, found.cached, found.arrivals_s) == ((10, 20), (5, 6), (0, 4), (3.0, 1.0))
