"""Is an engine read as it is written, and a typo answered with the key, the value and the nearest match?"""

import pytest

from kvreshard.catalog import EngineSpec, describe, load, parse_engine
from kvreshard.model import LayoutError


def test_everything_at_once() -> None:
    text = (
        "tp=4,pp=2,dcp=2,interleave=16,page=32,page.full=64,page.window.1=8,order=HND,conv=dim-first,dtype=fp8,spec=2,"
        "draft=off,interior=planes,kernel=16,pages=100"
    )
    assert parse_engine(text) == EngineSpec(
        tp=4, pp=2, dcp=2, interleave=16, page=32, page_of=(("full", 64), ("window.1", 8)), order="HND",
        conv_dim_first=True, dtype="fp8_e4m3", spec=2, draft=False, interior="planes", kernel=16, pages=100,
    )  # fmt: skip


def test_spaces_and_cases_of_values_do_not_matter() -> None:
    assert parse_engine(" tp = 2 , order=hnd") == EngineSpec(tp=2, order="HND")


def test_uneven_stages() -> None:
    assert parse_engine("pp=20+21+20") == EngineSpec(pp=3, stages=(20, 21, 20))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpp=2", r"'tpp' \(value '2'\) is not known; use one of tp, .*did you mean 'tp'\?"),
        ("page.=2", "'page.'.*is not known"),
        ("order=HDN", r"'order': value 'HDN' is not known; use one of NHD, HND, .*did you mean"),
        ("dtype=bfloat61", "did you mean 'bfloat16'"),
        (
            "conv=dimfirst",
            "'conv': value 'dimfirst' is not known; use one of dim-first, dim-last; did you mean 'dim-first'",
        ),
        ("interior=plane", "did you mean 'planes'"),
        ("draft=maybe", "'draft': value 'maybe' is not known; use one of on, off"),
        ("tp", "'tp': needs a value, as in tp=4"),
        ("tp=", "'tp=': needs a value"),
        ("tp=four", "'tp': 'four' is not a whole number"),
        ("tp=2.0", "'tp': '2.0' is not a whole number"),
        ("tp=0", "'tp': 0; must be at least 1"),
        ("pp=20+0", r"'pp \(stage 1\)': 0; must be at least 1"),
        ("pp=20+", "'pp': '' is not a whole number"),
        ("page=-16", "'page': -16; must be at least 1"),
        ("page.full=0", "'page.full': 0; must be at least 1"),
        ("spec=-1", "'spec': -1; must be at least 0"),
        ("tp=1,tp=1", "'tp': is given twice"),
        ("", r"^engine '': is empty; write tp=1 for one rank, and check whether a shell variable is unset$"),
        (" , ", "^engine ' , ': is empty"),
        ("tp=2,,pp=2", "^engine 'tp=2,,pp=2': has a comma with nothing beside it"),
        ("tp=2,", "^engine 'tp=2,': has a comma with nothing beside it"),
        ("tp=2,interleave=4", "'interleave': without dcp no ranks share the sequence"),
        ("tp=2,interleave=1", "'interleave': without dcp"),
        ("tp=2,dcp=1,interleave=4", "'interleave': 4, but without dcp"),
        ("pages=0", "'pages': 0; page 0 stands for no page, so a pool has at least 2"),
        ("pages=1", "'pages': 1; page 0 stands for no page, so a pool has at least 2"),
        ("tp=1_0", "'tp': '1_0' is not a whole number"),
        ("tp=+2", r"'tp': '\+2' is not a whole number"),
        ("tp=\u0664", "'tp': '\u0664' is not a whole number"),
        ("page=" + "9" * 5000, "'page': a number of 5000 digits; must be at most 4294967296"),
        ("TP=2", r"'TP' \(value '2'\) is not known; .*; did you mean 'tp'\?"),
        ("tp=2,\x1b[31mfoo=\x1b3", r"option '\\x1b\[31mfoo' \(value '\\x1b3'\) is not known"),
        ("tp=1," + "x" * 300 + "=1", r"option 'x{60}\.\.\. \(300 characters\)'"),
        ("tp=4,dcp=3", "'dcp': 3 does not divide tp=4"),
        ("tp=2,dcp=4", "'dcp': 4 does not divide tp=2"),
        ("tp=4,pcp=2,dcp=4", r"'dcp': 4 with tp=4,pcp=2; .*: use one of 1, 2, 8"),
        ("pcp=3,dcp=2", r"'dcp': 2 with tp=1,pcp=3; .*: use one of 1, 3$"),
        ("pcp=0", "'pcp': 0; must be at least 1"),
        ("tp=64,pcp=32", "'tp': 64 x pp=1 x pcp=32 are 2048 ranks; at most 1024"),
    ],
)
def test_a_typo_is_answered(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        parse_engine(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 0}, "'tp': 0; must be at least 1"),
        ({"page_of": (("full", -1),)}, "'page.full': -1"),
        ({"pp": 2, "stages": (1, 2, 3)}, "2 stages, but the layers of 3 are given"),
        ({"pp": 2, "stages": (1, 0)}, r"'pp \(stage 1\)': 0"),
        ({"order": "ABC"}, "value 'ABC' is not known"),
        ({"spec": -1}, "'spec': -1"),
        ({"spec": 10**6}, "'spec': 1000000; must be at most 1024"),
        ({"tp": 10**6}, "'tp': 1000000 x pp=1 are 1000000 ranks; at most 1024 are described"),
        ({"tp": 512, "pp": 4}, "'tp': 512 x pp=4 are 2048 ranks; at most 1024"),
        ({"pages": 1 << 40}, "'pages': 1099511627776; must be at most 4294967296"),
    ],
)
def test_a_spec_made_by_hand_is_checked_too(fields: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        EngineSpec(**fields)


def test_cache_dtypes_of_vllm() -> None:
    """Those that are described, and those that vLLM has and this command does not describe: no other one is proposed for them."""
    layout = describe(load("llama-3.1-8b"), parse_engine("dtype=fp8_e5m2"), "e")
    assert {(field.encoding, field.element_bytes) for field in layout.fields} == {("fp8_e5m2/scale-per-tensor", 1)}
    for value in ("nvfp4", "int8_per_token_head", "fp8_inc"):
        with pytest.raises(
            LayoutError, match=f"vLLM has '{value}', but the pages of such a cache are not described here"
        ) as caught:
            parse_engine(f"dtype={value}")
        assert "did you mean" not in str(caught.value)
