"""`kvreshard plan --html`: does the page say what `kvreshard plan` says, whatever the names are, and is it written whole or not at all?"""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvreshard.model import wire

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "wire"
PAIR = [GOLDEN / "prefill-v1.json", GOLDEN / "decode-v1.json"]
SAME = ("--prefill", "tp=1", "--decode", "tp=2")
FIGURES = ("num_bytes", "num_staged_bytes", "num_operations", "seconds")
PAIRS = {
    "heads": ("llama-3.1-70b", "tp=8,order=NHD", "tp=4,order=NHD"),
    "latents": ("deepseek-v3", "tp=4", "tp=2"),
    "states": ("qwen3-next-80b-a3b", "tp=2", "tp=4,page=32"),
    "grouped states": ("nemotron-3-nano-30b-a3b", "tp=2", "tp=4"),
    "windows": ("gemma-4-26b-a4b", "tp=4", "tp=8"),
    "context parallel": ("deepseek-v3", "tp=8,dcp=8", "tp=2"),
    "stages": ("llama-3.1-8b", "tp=2,pp=4", "tp=4"),
}


class Page(HTMLParser):
    """The tags of a page, and its data."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self._text: dict[str, str] = {}
        self._open = ""
        self.feed(file.read_text(encoding="utf-8"))
        self.title = self._text["title"]
        self.data: dict[str, Any] = json.loads(self._text["data"])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        self._open = str(found.get("id", tag))
        self.links += [str(found[name]) for name in ("src", "href") if name in found]

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        self._text[self._open] = self._text.get(self._open, "") + data

    def pairs(self, what: str) -> list[dict[str, Any]]:
        """What each decode rank reads from each prefill rank, as `kvreshard plan --json` has it."""
        step = [one["what"] for one in self.data["steps"]].index(what)
        found = []
        for link in self.data["links"]:
            figure = self.data["figures"][self.data["series"][link["series"]][step]]
            numbers = {name: figure[name] for name in FIGURES}
            found += [
                {"dst_rank": dst, "src_rank": link["src"], **numbers} for dst in link["dst"] if figure["num_bytes"]
            ]
        return sorted(found, key=lambda pair: (pair["dst_rank"], pair["src_rank"]))

    def holds(self, side: str, number: int) -> list[str]:
        (rank,) = (rank for rank in self.data[side] if rank["rank"] == number)
        return [band["text"] for band in self.data["holdings"][rank["holds"]]]


def words(model: str, prefill: str, decode: str) -> tuple[str, ...]:
    return "plan", "--model", model, "--prefill", prefill, "--decode", decode


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_every_figure_is_that_of_the_plan(run, tmp_path: Path, pair: tuple[str, str, str]) -> None:
    run(*words(*pair), "--html", tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    whats = [step["what"] for step in page.data["steps"]]
    assert whats[page.data["first"]] == "a request of 1,024 tokens"
    assert whats[-1] == "a request of 131,072 tokens"
    for what in (whats[0], whats[page.data["first"]], whats[-2]):
        tokens = re.sub(r"\D", "", what)
        request = json.loads(run(*words(*pair), "--tokens", tokens, "--json").stdout)["request"]
        assert page.pairs(what) == request["pairs"]
        step = page.data["steps"][whats.index(what)]
        assert step["seconds"] == request["predicted_seconds"]
        for name in FIGURES[:3]:
            assert step[name] == sum(one[name] for one in request["pairs"])
        for side, key in (("prefill", "src_rank"), ("decode", "dst_rank")):
            for rank in page.data[side]:
                figure = page.data["figures"][page.data["series"][rank["series"]][whats.index(what)]]
                own = [one for one in request["pairs"] if one[key] == rank["rank"]]
                assert figure["num_bytes"] == sum(one["num_bytes"] for one in own)


@pytest.mark.parametrize(
    ("pair", "who"),
    [
        ("heads", "Each decode rank reads 1 of 8 heads from each of 2 prefill ranks."),
        ("latents", "Each decode rank reads everything from one prefill rank."),
        ("windows", "Each decode rank reads 1 of 8, 1 of 2 heads from one prefill rank."),
        ("context parallel", "Each decode rank reads 1 of 8 tokens from each of 8 prefill ranks."),
        ("stages", "Each decode rank reads 2 of 8 heads in 8 of 32 layers from each of 4 prefill ranks."),
    ],
)
def test_a_sentence_says_who_reads_what(run, tmp_path: Path, pair: str, who: str) -> None:
    run(*words(*PAIRS[pair]), "--html", tmp_path / "page.html")
    assert Page(tmp_path / "page.html").data["who"] == who


NHD_8, NHD_4 = "tp=8,order=NHD", "tp=4,order=NHD"


def test_a_sentence_says_why_it_is_cheap_or_dear(run, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    whys = []
    for options in (("tp=2", "tp=2"), (NHD_8, NHD_4), (NHD_8, NHD_4, "--way", "direct")):
        run(
            "plan",
            "--model",
            "llama-3.1-70b",
            "--prefill",
            options[0],
            "--decode",
            *options[1:2],
            *options[2:],
            "--html",
            file,
        )
        data = Page(file).data
        whys.append(data["steps"][data["first"]])
    assert [why["verdict"] for why in whys] == ["cheap", "moderate", "dear"]
    assert "read into a staging buffer and permuted" in whys[1]["why"]
    assert "a copy has only" in whys[2]["why"]
    assert whys[1]["takes"] == "A request of 1,024 tokens takes 640 copies and 15.5 ms."


def test_bands_say_what_a_rank_holds(run, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    run(*words(*PAIRS["stages"]), "--html", file)
    assert Page(file).holds("prefill", 3) == ["layers.{8-15} of 32 layers", "head 4-7 of 8"]
    assert Page(file).holds("decode", 1) == ["layers.{0-31}", "head 2-3 of 8"]
    run(*words(*PAIRS["context parallel"]), "--html", file)
    assert Page(file).holds("prefill", 3) == ["layers.{0-60}", "token 3 mod 8"]
    assert Page(file).holds("decode", 0) == ["layers.{0-60}", "token all"]
    run(*words(*PAIRS["grouped states"]), "--html", file)
    assert {"head 32-63 of 64", "group 4-7 of 8", "head 1 of 2"} <= set(Page(file).holds("prefill", 1))
    run("plan", "--model", "jamba-1.5-mini", *SAME, "--html", file)
    assert "channel 4096-8191 of 8192" in Page(file).holds("decode", 1)


def test_the_page_needs_nothing_else(run, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    result = run("plan", "--model", "llama-3.1-8b", *SAME, "--html", file)
    assert result.stdout.startswith(
        f"{file}: llama-3.1-8b: prefill tp=1 (1 rank) -> decode tp=2 (2 ranks); a request of 16 tokens to "
    )
    page = Page(file)
    assert page.links == []
    assert "default-src 'none'" in file.read_text()
    assert list(tmp_path.iterdir()) == [file]


def test_options_of_a_request_decide_its_sizes(run, tmp_path: Path) -> None:
    file, llama = tmp_path / "page.html", ("plan", "--model", "llama-3.1-8b", *SAME)
    document = json.loads(
        run(*llama, "--tokens", "200000", "--hit", "70000", "--rank", 1, "--html", file, "--json").stdout
    )
    assert document["requests"] == [
        "a request of 131,072 tokens, 70,000 of them there already",
        "a request of 200,000 tokens, 70,000 of them there already",
    ]
    assert document["bytes"] == file.stat().st_size
    page = Page(file)
    assert page.data["first"] == 1
    assert [rank["rank"] for rank in page.data["decode"]] == [1]
    run(*llama, "--pages", 9, "--html", file)
    assert [step["what"] for step in Page(file).data["steps"]] == [
        f"a request of {n} tokens" for n in (16, 32, 64, 128)
    ]
    result = run("plan", *PAIR, "--tables", GOLDEN / "tables.json", "--html", file)
    assert result.exit_code == 0, result.stderr
    (step,) = Page(file).data["steps"]
    assert step["what"].startswith("the request of ")
    tables = tmp_path / "tables.json"  # nothing at the decode engine, nothing to move
    tables.write_text('{"prefill": {}, "decode": {}, "intervals": {"full": []}}')
    result = run(*llama, "--tables", tables, "--html", file)
    assert result.exit_code == 0, result.stderr
    (step,) = Page(file).data["steps"]
    assert step["verdict"] == "nothing"


HOSTILE = (
    "</script><script>document.title='hacked'</script>",
    "<img src=x onerror=alert(1)>",
    "a\"'&b",
    "$data ${title}",
)


def hostile_pair(folder: Path) -> list[Path]:
    """Two engines whose names of engine, fields and axes are markup, in folders named so too."""
    files = []
    for path in PAIR:
        text = path.read_text()
        layout = wire.decode(text.encode(), "json")
        names = [layout.fields[0].name, layout.fields[-1].name, layout.fields[0].axes[-1].name, layout.engine]
        for name, evil in zip(names, HOSTILE, strict=True):
            text = re.sub(rf'"{re.escape(name)}"', lambda _, evil=evil: json.dumps(evil), text)
        file = folder / f"<img src=x onerror=alert(2)> {path.name}"
        file.write_text(text)
        files.append(file)
    return files


def test_names_of_users_are_inert(run, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    result = run("plan", *hostile_pair(tmp_path), "--html", file)
    assert result.exit_code == 0, result.stderr
    page, text = Page(file), file.read_text()
    assert page.tags.count("script") == 2
    assert "img" not in page.tags
    assert "onerror=alert(2)>" in page.title
    for evil in HOSTILE[:2]:
        assert evil not in text
        assert evil in json.dumps(page.data)


@pytest.mark.parametrize(
    ("path", "told"),
    [("none/page.html", "No such file or directory"), ("folder", "Is a directory"), ("x" * 300, "File name too long")],
)
def test_a_file_that_cannot_be_written_is_one_error(run, tmp_path: Path, path: str, told: str) -> None:
    (tmp_path / "folder").mkdir()
    result = run("plan", "--model", "llama-3.1-8b", *SAME, "--html", tmp_path / path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: output file '{tmp_path / path}' cannot be written: {told}; nothing was written\n"
    assert [found.name for found in tmp_path.rglob("*")] == ["folder"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--prefill", "tp=1,dtype=fp8", "--decode", "tp=2"), "error: "),
        ((*SAME, "--pages", 9, "--tokens", 5000), "has 8 free pages"),
        ((*SAME, "--pages", 1), "a pool has at least 2"),
        ((*SAME, "--copies", "--tokens", 16), "without --html"),
    ],
)
def test_what_is_refused_leaves_the_file_alone(run, tmp_path: Path, options: tuple[object, ...], told: str) -> None:
    file = tmp_path / "page.html"
    file.write_text("before")
    result = run("plan", "--model", "llama-3.1-8b", *options, "--html", file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr
    assert result.stderr.count("\n") == 1
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "most_bytes"),
    [
        (("deepseek-v3", "tp=64", "tp=32"), 200_000),
        (("llama-3.1-8b", "tp=64,pp=8", "tp=32,pp=16"), 500_000),
        (("deepseek-v3", "tp=8,pp=61", "tp=64"), 1_000_000),
    ],
    ids=["64 to 32", "512 ranks", "3904 links"],
)
def test_many_ranks_make_a_page_of_moderate_size(
    run, tmp_path: Path, pair: tuple[str, str, str], most_bytes: int
) -> None:
    file = tmp_path / "page.html"
    assert run(*words(*pair), "--html", file).exit_code == 0
    assert file.stat().st_size < most_bytes
    page = Page(file)
    assert len(page.data["decode"]) > 30


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path to open the page with")
# What a person does, before the document is printed: see what is there, move the slider, focus a link, choose a rank.
VISIT = """
const told = {}, by = id => document.getElementById(id);
const tell = name => { told[name] = ["takes", "bytes", "copies", "facts"].map(id => by(id).textContent); };
tell("opened");
by("size").value = by("size").max;
by("size").dispatchEvent(new Event("input"));
tell("moved");
document.querySelector(".hit").dispatchEvent(new Event("focus"));
tell("focused");
told.rows = by("reads").tBodies[0].rows.length;
by("only").value = "decode 1";
by("only").dispatchEvent(new Event("change"));
tell("chosen");
told.lines = document.querySelectorAll(".link").length - 3;
told.cards = [...document.querySelectorAll(".rank")].filter(card => !card.hidden).map(card => card.textContent);
told.less = by("reads").tBodies[0].rows.length;
told.wide = document.documentElement.scrollWidth > innerWidth;
told.title = document.title;
const script = document.createElement("script");
script.type = "application/json";
script.id = "told";
script.textContent = JSON.stringify(told).replaceAll("<", "\\\\u003c");
document.body.append(script);
"""


def visit(file: Path, width: int = 1440) -> tuple[dict[str, Any], list[str]]:
    """What a page says while it is used, and its tags then."""
    page = file.read_text().replace("</body>", f"<script>{{{VISIT}}}</script></body>")
    file.write_text(page)
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={file.parent / 'profile'}",
    ]
    command += [f"--window-size={width},1000", "--virtual-time-budget=3000", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    shown = file.with_suffix(".shown.html")
    shown.write_text(done.stdout)
    assert "data-ready" in done.stdout
    told = re.search(r'<script type="application/json" id="told">(.*?)</script>', done.stdout, re.DOTALL)
    assert told is not None
    return json.loads(told[1]), Page(shown).tags


@BROWSER
@pytest.mark.slow
@pytest.mark.parametrize("width", [1440, 390])
def test_a_browser_shows_the_plan(run, tmp_path: Path, width: int) -> None:
    file = tmp_path / "page.html"
    run(*words(*PAIRS["heads"]), "--html", file)
    told, _ = visit(file, width)
    assert told["opened"][:3] == ["A request of 1,024 tokens takes 640 copies and 15.5 ms.", "320 MiB", "640"]
    assert told["moved"][0].startswith("A request of 131,072 tokens takes 2,560 copies and ")
    assert told["moved"][1:3] == ["40 GiB", "2,560"]
    assert told["focused"][3].startswith("decode 0 reads from prefill 0")
    assert "50 % of what decode 0 reads, 100 % of what is read from prefill 0" in told["focused"][3]
    assert "layers.{0-79}.attn.{k,v}" in told["focused"][3]
    assert told["chosen"][3].startswith("decode 1 (pp 0, tp 1)")
    assert (told["rows"], told["less"], told["lines"]) == (8, 2, 2)
    assert [card.split("layers")[0] for card in told["cards"]] == [
        "pp 0, tp 2prefill 2",
        "pp 0, tp 3prefill 3",
        "pp 0, tp 1decode 1",
    ]
    assert not told["wide"]


@BROWSER
@pytest.mark.slow
def test_a_browser_runs_no_name(run, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    run("plan", *hostile_pair(tmp_path), "--html", file)
    told, tags = visit(file)
    assert told["title"].startswith("kvreshard plan: prefill ")
    assert HOSTILE[0] in told["focused"][3] or HOSTILE[1] in told["focused"][3]
    assert "img" not in tags


@BROWSER
@pytest.mark.slow
def test_a_browser_draws_512_ranks(run, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    run(*words("llama-3.1-8b", "tp=64,pp=8", "tp=32,pp=16"), "--html", file)
    told, _ = visit(file)
    assert (told["rows"], told["less"], told["lines"]) == (500, 1, 1)


def test_no_name_is_one_error_and_a_link_stays_a_link(run, tmp_path: Path) -> None:
    result = run("plan", "--model", "llama-3.1-8b", *SAME, "--html", "")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "is no name of a file" in result.stderr
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    link.symlink_to(target)
    assert run("plan", "--model", "llama-3.1-8b", *SAME, "--html", link).exit_code == 0
    assert link.is_symlink()
    assert target.read_text().startswith("<!doctype html>")
