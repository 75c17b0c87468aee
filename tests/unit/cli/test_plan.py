"""`kvreshard plan`: is the table right and stable, and is every bad file refused before anything is printed?"""

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvreshard.cli.app import app

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "wire"
PAIR = [GOLDEN / "prefill-v1.json", GOLDEN / "decode-v1.json"]
TABLES: dict[str, Any] = json.loads((GOLDEN / "tables.json").read_text())

GEMMA = """\
gemma-4-26b-a4b: prefill tp=4 (4 ranks) -> decode tp=8 (8 ranks)
moved: 80 KiB per token and 200 KiB per token of the last 1,024, to 8 decode ranks together

a request of 1,024 tokens, what each decode rank reads
decode rank  reads from   bytes  staged  operations  predicted
0-1          0           35 MiB     0 B       1,920    4.93 ms
2-3          1           35 MiB     0 B       1,920    4.93 ms
4-5          2           35 MiB     0 B       1,920    4.93 ms
6-7          3           35 MiB     0 B       1,920    4.93 ms
all: 280 MiB in 15,360 operations; predicted 4.93 ms, the slowest decode rank by itself

group window.{0-4}, the last 1,024 tokens, pages of 16 -> 32 tokens
layers.{0-4,6-10,12-16,...,24-28}.attn.{k,v}
decode rank  reads from  what         per token  a page alone
0            0           head 0 of 8     25 KiB  direct
1            0           head 1 of 8     25 KiB  direct
2            1           head 2 of 8     25 KiB  direct
"""
DETAILS = """\
layers.{0-4,6-10,12-16,18-22,24-28}.attn.{k,v}
decode rank  reads from  what         per token  runs per page  a page alone
0            0           head 0 of 8     25 KiB     5 x 16 KiB  direct
"""
SOURCES = """\
prefill ranks
prefill rank  read by decode ranks  reported to by                   per token
0             0-1                   0-1             20 KiB + 50 KiB in windows
1             2-3                   2-3             20 KiB + 50 KiB in windows
2             4-5                   4-5             20 KiB + 50 KiB in windows
3             6-7                   6-7             20 KiB + 50 KiB in windows
"""
GEMMA_4_TO_8 = ("plan", "--model", "gemma-4-26b-a4b", "--prefill", "tp=4", "--decode", "tp=8")
HYBRID = ("plan", "--model", "qwen3-next-80b-a3b", "--prefill", "tp=2", "--decode", "tp=4,page=32")
WINDOWS = ("--model", "gemma-4-26b-a4b", "--prefill", "tp=2", "--decode")


def test_piped_output_is_plain_and_stable(run) -> None:
    out = run(*GEMMA_4_TO_8, "--way", "direct").stdout
    assert out.startswith(GEMMA)
    assert "\x1b" not in out


def test_details_have_runs_reasons_and_sources(run) -> None:
    out = run(*GEMMA_4_TO_8, "--way", "direct", "--details").stdout
    assert DETAILS in out
    assert "direct: forced; 5 runs one by one " in out
    assert SOURCES in out


def test_json_has_every_number_exact_and_fields_as_patterns(run) -> None:
    document = json.loads(run(*GEMMA_4_TO_8, "--json").stdout)
    assert document["decode_ranks"] == list(range(8))
    assert document["bytes_per_token"] == 8 * 10 * 1024
    assert document["window_bytes_per_token"] == {"1024": 8 * 25 * 1024}
    window, full = document["subjects"]
    assert (window["window_tokens"], full["window_tokens"]) == (1024, None)
    assert (window["fields"], window["num_fields"]) == (["layers.{0-4,6-10,12-16,18-22,24-28}.attn.{k,v}"], 50)
    assert window["readings"][2]["parts"] == {"token": [], "head": [{"start": 2, "stop": 3}], "channel": []}
    assert full["readings"][0]["dst_ranks"] == [0, 1]


def test_states_of_a_hybrid_are_one_block_and_page_sizes_are_told(run) -> None:
    out = run(*HYBRID).stdout
    assert out.count("group state.{0-2}, one page per request\n") == 1
    assert "layers.{0-2,4-6,8-10,...,44-46}.delta.{conv.q,conv.k,conv.v,ssm}\n" in out
    told = "pages hold {} tokens, not {}: beside states, vLLM makes an attention page as large as a state"
    notes = [f"prefill {told.format(544, 16)}", f"decode {told.format(288, 32)}"]
    assert [line.removeprefix("note: ") for line in out.splitlines() if line.startswith("note: ")] == notes
    assert json.loads(run(*HYBRID, "--json").stdout)["notes"] == notes


def totals(run, *words: object) -> tuple[int, int]:
    """Bytes and operations of the request of a plan."""
    pairs = json.loads(run(*words, "--json").stdout)["request"]["pairs"]
    return sum(pair["num_bytes"] for pair in pairs), sum(pair["num_operations"] for pair in pairs)


def test_an_invented_request_costs_what_it_copies(run) -> None:
    words = ("plan", "--model", "llama-3.1-8b", "--prefill", "tp=2", "--decode", "tp=4", "--way", "direct")
    per_token, tokens = 131_072, ("--tokens", "5000")
    assert totals(run, *words, *tokens)[0] == 5000 * per_token
    assert totals(run, *words, *tokens, "--hit", "4999")[0] == per_token
    copies = json.loads(run(*words, *tokens, "--hit", "4990", "--copies", "--json").stdout)["copies"]
    assert sum(copy["length"] for copy in copies) == 10 * per_token
    assert totals(run, *words, *tokens, "--hit", "4990") == (10 * per_token, len(copies))


def _plan(run: Callable[..., Any], model: str, prefill: str, decode: str, *options: str) -> str:
    text: str = run("plan", "--model", model, "--prefill", prefill, "--decode", decode, *options).output
    return text


@pytest.mark.parametrize(("model", "orders"), [("llama-3.1-8b", "order=BHLNC"), ("gpt-oss-120b", "order=BHLNC")])
def test_an_order_in_which_pages_are_one_copy_is_told_with_what_it_would_cost(run, model: str, orders: str) -> None:
    text = _plan(run, model, "tp=1", "tp=4", "--tokens", "4096")
    (note,) = [line for line in text.splitlines() if line.startswith("note: ") and "VLLM_KV_CACHE_LAYOUT=BHLNC" in line]
    count, seconds = note.removeprefix("note: ").split(" operations, predicted ")
    there = _plan(run, model, f"tp=1,{orders}", f"tp=4,{orders}", "--tokens", "4096")
    assert f"in {count} operations; predicted {seconds.partition(', with')[0]}," in there
    assert "VLLM_KV_CACHE_LAYOUT" not in there


def test_what_is_noted_of_the_engines_is_told_once(run) -> None:
    lines = _plan(run, "nemotron-3-nano-30b-a3b", "tp=4", "tp=2", "--tokens", "4096").splitlines()
    assert [line.partition(":")[0] for line in lines if "pages hold" in line] == ["note", "note"]


def test_one_operation_is_no_plural_and_large_counts_have_commas(run, tmp_path: Path) -> None:
    tokens = ("--tokens", "16")
    assert " MiB in 1 operation; predicted " in _plan(
        run, "llama-3.1-8b", "tp=1,order=BLHNC", "tp=1,order=BLHNC", *tokens
    )
    text = _plan(run, "llama-3.1-8b", "tp=1", "tp=1", *tokens)
    assert "note: 1 operation, predicted " in text
    page = tmp_path / "page.html"
    _plan(run, "llama-3.1-8b", "tp=1,order=BLHNC", "tp=1,order=BLHNC", *tokens, "--html", str(page))
    assert "A request of 16 tokens takes 1 copy and " in page.read_text()
    text = _plan(run, "llama-3.1-8b", "tp=1,page=2048,order=NHD", "tp=2,page=16384", "--way", "direct", "--details")
    assert "group full, pages of 2,048 -> 16,384 tokens\n" in text
    assert "direct: forced; 262,144 runs one by one " in text


@pytest.mark.parametrize(
    ("model", "prefill", "options"),
    [
        ("gqa-mla-draft", "tp=4", []),  # vLLM has no such order where a draft has other pages, and it would gain
        ("nemotron-3-nano-30b-a3b", "tp=4", []),  # vLLM has no such order beside states
        ("gemma-4-26b-a4b", "tp=4", []),  # nor for layers of other head counts
        ("llama-3.1-8b", "tp=4,order=HND", []),
        ("llama-3.1-8b", "tp=4", ["--json"]),
    ],
)
def test_no_other_order_is_told_of(run, model: str, prefill: str, options: list[str]) -> None:
    assert "VLLM_KV_CACHE_LAYOUT" not in _plan(run, model, prefill, "tp=2", *options)


def test_copies_in_words_name_field_tokens_and_heads(run) -> None:
    words = (
        "plan",
        "--model",
        "llama-3.1-8b",
        "--prefill",
        "tp=1,order=NHD",
        "--decode",
        "tp=2,page=32,order=NHD",
        "--tokens",
        "40",
    )
    lines = run(*words, "--hit", "32", "--copies", "--explain").stdout.splitlines()
    assert len(lines) == 2 * 32 * 8
    both = "layers.3.attn.k token 33, head 4-7; layers.3.attn.v token 33, head 4-7"
    (found,) = (line for line in lines if both in line)
    assert found.startswith(f"decode 1 <- prefill 0      2,048 B  {both}  from 0x")
    copies = json.loads(run(*words, "--hit", "32", "--copies", "--explain", "--json").stdout)["copies"]
    assert sum(both == copy["what"] for copy in copies) == 1
    assert {copy["what"].split(",")[0] for copy in copies if copy["dst_rank"] == 0} == {
        f"layers.{layer}.attn.k token {token}" for layer in range(32) for token in range(32, 40)
    }


def test_copies_of_states_and_several_pages_are_named_too(run) -> None:
    out = run(*HYBRID, "--tokens", "700", "--copies", "--explain").stdout
    assert "  layers.0.delta.ssm head 0-7  from " in out
    whole = ("plan", "--model", "deepseek-v2-lite", "--prefill", "tp=1", "--decode", "tp=1", "--tokens", "40")
    lines = run(*whole, "--copies", "--explain").stdout.splitlines()
    assert sum("attn.latent token 0-39  from " in line for line in lines) == 27


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--tokens", "64", "--hit", "64"), "--hit 64 with --tokens 64: of N tokens"),
        (("--hit", "3"), "--hit 3 with no --tokens"),
        (("--explain",), "--explain describes copies, and none are printed"),
        (("--tokens", "3", "--tables", "x.json"), "are two requests"),
        (("--copies",), "give --tables FILE, or --tokens N to make one up"),
        (
            ("--tokens", "5000", "--pages", "9"),
            "pool 'pages' of engine 'prefill' has 8 free pages, group 'full' needs 313",
        ),
    ],
)
def test_requests_that_cannot_be_invented_are_refused(run, options: tuple[str, ...], told: str) -> None:
    result = run("plan", "--model", "llama-3.1-8b", "--prefill", "tp=1", "--decode", "tp=2", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr


def test_a_layout_file_and_an_engine_go_together(run, tmp_path: Path) -> None:
    model = ("--model", "llama-3.1-8b")
    assert (
        run("describe", *model, "--engine", "tp=2", "--name", "prefill", "--output", tmp_path / "a.json").exit_code == 0
    )
    from_file = run("plan", *model, "--prefill-layout", tmp_path / "a.json", "--decode", "tp=4", "--json")
    from_model = run("plan", *model, "--prefill", "tp=2", "--decode", "tp=4", "--json")
    named = from_file.stdout.replace(f"prefill ({tmp_path / 'a.json'})", "prefill")
    assert from_file.stdout != named
    assert {**json.loads(named), "notes": []} == json.loads(from_model.stdout)


def test_only_some_ranks_and_a_forced_way(run) -> None:
    options = ("--model", "deepseek-v2-lite", "--prefill", "tp=4", "--decode", "tp=2", "--rank", "1", "--way", "staged")
    out = run("plan", *options, "--details").stdout
    assert "staged: forced; " in out
    assert "to 1 decode rank\n" in out
    document = json.loads(run("plan", *options, "--json").stdout)
    assert {reading["way"] for subject in document["subjects"] for reading in subject["readings"]} == {"staged"}


def test_unread_sources_and_one_sided_drafts_are_told(run) -> None:
    out = run("plan", "--model", "deepseek-v3", "--prefill", "tp=4,spec=1", "--decode", "tp=1").stdout
    assert "prefill ranks 1-3 are read by no decode rank; decode rank 0 reports when pages are free\n" in out
    assert "warning: field 'mtp.0.attn.latent': in engine 'prefill' but not in engine 'decode', so not moved" in out


def test_a_plan_without_a_request_says_why(run) -> None:
    words = ("plan", "--model", "gpt-oss-120b", "--prefill", "tp=1", "--decode", "tp=2", "--pages", "2")
    told = "no request is shown: none fits these engines; --tokens 1 says why"
    assert f"note: {told}\n" in run(*words).stdout
    document = json.loads(run(*words, "--json").stdout)
    assert (document["request"], document["notes"]) == (None, [told])
    assert "has 0 free pages, group 'full' needs 1" in run(*words, "--tokens", "1").stderr


@pytest.mark.parametrize("view", [("--copies", "--tokens", "3"), ("--fills", "--tokens", "3"), ("--html",)])
def test_what_is_not_moved_is_told_in_every_view_once(run, tmp_path: Path, view: tuple[str, ...]) -> None:
    words = ("plan", "--model", "deepseek-v3", "--prefill", "tp=1", "--decode", "tp=1,spec=1", *view)
    words = (*words, tmp_path / "page.html") if view == ("--html",) else words
    told = "field 'mtp.0.attn.latent': in engine 'decode' but not in engine 'prefill', so not moved"
    assert run(*words).stderr.count(f"warning: {told}") == 1
    result = run(*words, "--json")
    assert result.stderr.count(told) == 1
    assert [warning.startswith(told) for warning in json.loads(result.stdout)["warnings"]] == [True]


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    tables: dict[str, Any] = json.loads(json.dumps(TABLES))
    change(tables)
    return tables


BAD_TABLES = [
    (
        lambda t: t["decode"]["full"]["pages"].pop(),
        "the destination's pages [1, 2), but its block table has pages [0, 1)",
    ),
    (lambda t: t["prefill"].pop("full"), "group 'full': the source gives no block table"),
    (lambda t: t["decode"].update(fool=t["decode"]["full"]), "decode: group 'fool' is not one of engine 'decode ("),
    (lambda t: t["intervals"].update(fool=[]), "intervals: group 'fool' is not one of engine 'decode ("),
    (lambda t: t["intervals"].pop("state"), "intervals: group 'state' is missing"),
    (lambda t: t["intervals"].update(full=[[-1, 3]]), "Expected `int` >= 0 - at `$.intervals[...][0][0]`"),
    (lambda t: t["intervals"].update(full=[[3, 3]]), "token intervals [(3, 3)] must be ascending"),
    (lambda t: t["intervals"].update(full=[[0, 4], [3, 6]]), "must be ascending, disjoint"),
    (lambda t: t["intervals"].update(full=[[0, 4, 6]]), "$.intervals"),
    (lambda t: t["intervals"].update(full=[[0, 7]]), "tokens up to 7 are to be moved, but the source's pages hold 6"),
    (lambda t: t["prefill"]["full"].update(pages=[3, "1"]), "Expected `int`, got `str`"),
    (lambda t: t["prefill"]["full"].update(pages=[3, 4]), "pages names page 4, but pool 'pages' of engine 'prefill ("),
    (lambda t: t["prefill"]["full"].update(pages=[3, 1 << 80]), "$.prefill"),
    (lambda t: t["prefill"]["full"].update(pages=[3, 0]), "null page 0"),
    (lambda t: t["prefill"]["full"].update(first_page=1), "need the source's pages [0, 2)"),
    (lambda t: t["prefill"]["full"].update(frist_page=1), "unknown field `frist_page`"),
    (
        lambda t: t["prefill"]["full"].update(new_pages=[3]),
        "unknown field `new_pages` - at `$.prefill[...]`; `new_pages` is a key of another object",
    ),
    (lambda t: t["prefill"]["state"].update(num_tokens=5), "the source's state has absorbed 5 tokens"),
    (
        lambda t: t["decode"]["state"].update(pages=[2], new_pages=[]),
        "page 2 of destination pool 'pages' is written twice",
    ),
    (lambda t: t["decode"]["full"].update(new_pages=[3]), "page 3 is called new, but is not in"),
    (
        lambda t: t["decode"]["full"].update(new_pages=[1, 1]),
        "new_pages names page 1 of pool 'pages', which new_pages of group 'full' names too",
    ),
    (lambda t: t["decode"]["full"].update(new_pages=t["decode"]["state"]["new_pages"]), "a page is new once"),
    (lambda t: t["decode"]["full"].update(new_pages=[9]), "new_pages names page 9"),
    (lambda t: t.update(version=2), "is of version 2; this command reads version 1: rewrite it"),
    (lambda t: t.pop("decode"), "missing required field `decode`"),
]


@pytest.mark.parametrize(("change", "told"), BAD_TABLES, ids=[told for _, told in BAD_TABLES])
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["lines", "json"])
def test_bad_tables_print_nothing_but_the_error(run, tmp_path: Path, change, told: str, options: list[str]) -> None:
    file = tmp_path / "tables.json"
    file.write_text(json.dumps(changed(change)))
    result = run("plan", *PAIR, "--copies", "--fills", "--tables", file, *options)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: tables file '{file}': ")
    assert told in result.stderr
    assert "copies" not in result.stdout
    assert result.stdout == "" or json.loads(result.stdout)["error"]["message"] in result.stderr


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"prefill": {"full"', "truncated"),
        (b"", "truncated"),
        (b"\xff\xfe", "not a tables file"),
        (b"[" * 100_000, "not a tables file"),
        (b"[]", "Expected `object`"),
    ],
    ids=["cut", "empty", "binary", "deep", "list"],
)
def test_files_that_are_no_tables(run, tmp_path: Path, content: bytes, told: str) -> None:
    file = tmp_path / "tables.json"
    file.write_bytes(content)
    result = run("plan", *PAIR, "--copies", "--tables", file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr
    assert str(file) in result.stderr


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text[: len(text) // 2], "truncated"),
        (
            lambda text: text.replace('"version": 1', '"version": 2'),
            "layout of version 2; this side reads version 1: run the same release",
        ),
        (
            lambda text: text.replace("kvreshard.layout", "kvreshard.route"),
            "message is a 'kvreshard.route'",
        ),
        (lambda text: text.replace('"size_bytes": 120', '"size_bytes": 119'), "region 'kv' has 119 bytes"),
        (lambda text: text.replace('"element_bytes"', '"element_size"'), "element"),
        (lambda text: text.replace('"num_pages": 5', '"num_pages": 0'), "0 pages; a size must be positive"),
        (lambda text: text.replace('"stop": 1', '"stop": 0', 1), "holds nothing"),
    ],
    ids=["cut", "later", "other", "short", "typo", "zero", "empty"],
)
def test_bad_layout_files_are_refused_by_name(run, tmp_path: Path, change, told: str) -> None:
    file = tmp_path / "decode.json"
    file.write_text(change(PAIR[1].read_text()))
    result = run("plan", PAIR[0], file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: decode layout file '{file}': ")
    assert told in result.stderr


def changed_layout(file: Path, change: Callable[[dict[str, Any]], object], *engine: str) -> Path:
    """A layout of a file of `describe`, changed by hand."""
    CliRunner().invoke(app, ["describe", "--output", str(file), *engine])
    layout = json.loads(file.read_text())
    change(layout)
    file.write_text(json.dumps(layout))
    return file


def drop_rank(number: int) -> Callable[[dict[str, Any]], None]:
    return lambda layout: layout.update(ranks=[rank for rank in layout["ranks"] if rank["rank"] != number])


def test_two_files_of_one_name_are_told_apart(run, tmp_path: Path) -> None:
    llama, qwen = (
        changed_layout(tmp_path / f"{model}.json", lambda layout: None, "--model", model)
        for model in ("llama-3.1-8b", "qwen3-32b")
    )
    result = run("plan", llama, qwen)
    assert result.exit_code == 2
    assert f"'prefill ({llama})'" in result.stderr
    assert f"'decode ({qwen})'" in result.stderr
    assert "'engine'" not in result.stderr
    result = run("plan", llama, tmp_path / "none.json")
    assert (
        result.stderr
        == f"error: decode layout file '{tmp_path / 'none.json'}' cannot be read: No such file or directory; check the path\n"
    )
    assert run("plan", llama, llama).stdout.startswith(f"prefill {llama} (1 rank) -> decode {llama} (1 rank)\n")


@pytest.mark.parametrize(
    ("engine", "change", "told"),
    [
        ("tp=5", drop_rank(3), "no rank holds head [4, 6) of 64 fields"),
        ("tp=2,pp=2", drop_rank(3), "no rank holds head [4, 8) of 32 fields"),
        ("pp=2", drop_rank(1), "no rank holds anything of 32 fields"),
        ("tp=4,dcp=2", drop_rank(3), "no rank holds token 1 of every 2 from 1, head [4, 8) of 64 fields"),
        ("tp=16", drop_rank(3), ""),
    ],
    ids=["rank", "rank of a stage", "stage", "turn", "replica"],
)
def test_a_decode_layout_that_lacks_something_is_refused_unless_asked_for(
    run, tmp_path: Path, engine: str, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    model = ("--model", "llama-3.1-8b")
    file = changed_layout(tmp_path / "d.json", change, *model, "--engine", engine)
    options = ("plan", *model, "--prefill", "tp=2", "--decode-layout", file)
    result = run(*options)
    assert result.exit_code == (2 if told else 0)
    if told:
        assert f"engine 'decode ({file})': {told}" in result.stderr
        assert "give --incomplete" in result.stderr
        allowed = run(*options, "--incomplete", "--json")
        assert allowed.exit_code == 0
        assert any(told in warning for warning in json.loads(allowed.stdout)["warnings"])


def test_a_null_page_outside_of_its_pool_is_refused(run, tmp_path: Path) -> None:
    model = ("--model", "llama-3.1-8b", "--pages", "5")
    file = changed_layout(tmp_path / "d.json", lambda layout: layout["groups"][0].update(null_page=5), *model)
    assert "null page 5 is not one of its pages [0, 5)" in run("plan", file, file).stderr


def test_a_directory_is_no_layout(run, tmp_path: Path) -> None:
    result = run("plan", tmp_path, tmp_path)
    assert result.exit_code == 2
    assert "cannot be read: Is a directory" in result.stderr


def test_fills_alone(run) -> None:
    lines = run("plan", *PAIR, "--fills", "--tables", GOLDEN / "tables.json").stdout.splitlines()
    assert [sorted(json.loads(line)) for line in lines] == [["dst_address", "dst_rank", "length"]] * 2


@pytest.mark.parametrize("option", [("--model", "llama-3.1-8b"), ("--draft", "llama-3.1-8b"), ("--pages", "9")])
def test_an_option_that_two_layout_files_leave_nothing_to_say_to_is_refused(run, option: tuple[str, str]) -> None:
    for files in (PAIR, ["--prefill-layout", PAIR[0], "--decode-layout", PAIR[1]]):
        result = run("plan", *files, *option)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{' '.join(option)}: both engines are layout files, which need nothing else" in result.stderr


@pytest.mark.parametrize("place", ["<(cat config.json)", "/dev/stdin < config.json"], ids=["substitution", "stdin"])
def test_a_model_that_comes_through_a_pipe_is_read_once_for_both_engines(tmp_path: Path, place: str) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = f"{sys.executable} -m kvreshard plan --prefill tp=1 --decode tp=2 --model {place}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "moved: 512 B per token" in done.stdout


def test_layout_files_are_said_to_name_no_model(run) -> None:
    assert "note: layout files name no model" in run("plan", *PAIR).output


def test_one_layout_file_beside_an_engine_names_no_model_either(run, tmp_path: Path) -> None:
    run("describe", "--model", "llama-3.1-8b", "--output", tmp_path / "one.json")
    words = ("plan", "--model", "llama-3.1-8b", "--prefill-layout", tmp_path / "one.json", "--decode", "tp=2")
    assert run(*words).stdout.count("note: layout files name no model") == 1
    assert len(json.loads(run(*words, "--json").stdout)["notes"]) == 1


def test_an_option_about_a_file_that_is_not_there_is_refused(run) -> None:
    result = run("plan", "--model", "llama-3.1-8b", "--prefill", "tp=1", "--decode", "tp=2", "--incomplete")
    assert (result.exit_code, "--incomplete is about a decode layout" in result.output) == (2, True)


def test_a_model_type_that_nobody_knows_is_told(run, tmp_path: Path) -> None:
    config = {
        "model_type": "lama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    (tmp_path / "c.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    text = _plan(run, str(tmp_path / "c.json"), "tp=1", "tp=2")
    assert "model type 'lama' is not known, and was read as plain attention" in text


def test_fp8_latents_beside_sparse_indexers_are_told_to_have_two_forms(run) -> None:
    told = "where FlashMLA reads them vLLM 0.32 packs them: then give dtype=fp8_ds_mla"
    assert told in " ".join(_plan(run, "deepseek-v3.2", "tp=8,dtype=fp8", "tp=8,dtype=fp8").split())
    assert told not in " ".join(_plan(run, "deepseek-v3.2", "tp=8", "tp=8,dtype=auto").split())
    assert told not in " ".join(_plan(run, "deepseek-v3", "tp=8,dtype=fp8", "tp=8,dtype=fp8").split())


def test_a_pool_of_billions_of_pages_is_not_listed(run) -> None:
    """With half a gigabyte more than this process has: a list of such a pool is larger than any machine."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29), before[1]))
    try:
        usual, huge = (run("plan", *WINDOWS, f"tp=1,pages={pages}") for pages in (4096, 1 << 32))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert usual.exit_code == huge.exit_code == 0, huge.stderr
    assert usual.stdout.splitlines()[1:] == huge.stdout.splitlines()[1:]
