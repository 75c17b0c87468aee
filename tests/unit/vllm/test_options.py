"""Defaults, typos and wrong values of options, and versions of vLLM."""

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvreshard.model import KvReshardError
from kvreshard.plan.cost import DEVICE_COST, MEASURED_SPEEDUP, CostModel
from kvreshard.session.commands import EndpointOptions
from kvreshard.session.constants import host_description, save_constants
from kvreshard.session.keys import write_keys
from kvreshard.transport.nixl_agent import NixlOptions
from kvreshard.transport.posting import Pace
from kvreshard.vllm.options import BACKENDS, OF_NIXL_CONNECTOR, Options, read_load_timeout, read_options


def test_nothing_given_is_the_defaults() -> None:
    options = read_options({})
    assert options == Options()
    assert options.endpoint().heartbeat_s == 5.0
    assert options.nixl.pace == Pace()
    assert read_options({"max_in_flight_bytes": 7}).nixl.pace.max_in_flight_bytes == 7
    assert read_options({"call_timeout_s": 7}).nixl.pace.call_s == 7.0
    assert read_options({"paused_renewal_s": 900}).endpoint().paused_renewal_s == 900
    assert {field.name for field in dataclasses.fields(EndpointOptions)} <= set(dir(options.endpoint()))


@pytest.mark.parametrize(("lease_s", "interval_s"), [(1, 1 / 6), (30, 5.0), (3600, 5.0)])
def test_a_source_that_is_not_known_yet_may_have_the_default_lease_time(lease_s: float, interval_s: float) -> None:
    assert read_options({"kv_lease_duration": lease_s}).endpoint().heartbeat_s == interval_s


def test_a_typo_is_told_with_what_was_meant() -> None:
    with pytest.raises(
        KvReshardError, match=r"no option 'load_timout_s'; did you mean 'load_timeout_s'\? There are: allow"
    ):
        read_options({"load_timout_s": 3})


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"load_timeout_s": "soon"}, "Expected `float`, got `str`.*load_timeout_s"),
        ({"load_timeout_s": 0}, "load_timeout_s is 0"),
        ({"kv_lease_duration": 0}, "kv_lease_duration is 0; it must be from 1 to 86400 seconds"),
        ({"kv_lease_duration": -30.0}, "kv_lease_duration is -30; it must be from 1 to 86400 seconds"),
        ({"kv_lease_duration": 0.5}, "kv_lease_duration is 0.5; it must be from 1 to 86400 seconds"),
        ({"kv_lease_duration": 1e6}, r"kv_lease_duration is 1e\+06; it must be from 1 to 86400 seconds"),
        ({"kv_lease_duration": float("nan")}, "kv_lease_duration is nan; it must be a finite number"),
        ({"decoder_kv_blocks_ttl": 0}, "decoder_kv_blocks_ttl is 0; it must be from 1 to 86400 seconds"),
        ({"kv_recompute_threshold": -1}, "kv_recompute_threshold is -1; it must not be negative"),
        ({"bidirectional_kv_xfer": "yes"}, "Expected `bool`, got `str`.*bidirectional_kv_xfer"),
        ({"paused_renewal_s": 0}, "paused_renewal_s is 0; it must be from 1 to 86400 seconds"),
        ({"load_timeout_s": float("inf")}, "load_timeout_s is inf; it must be a finite number"),
        ({"digest_share": 1.5}, "digest_share is 1.5; it must be from 0 to 1, a share of all requests"),
        ({"side_channel_port": 99999}, "side_channel_port is 99999; it must be from 0 to 65535"),
        ({"side_channel_port": -1}, "side_channel_port is -1; it must be from 0 to 65535"),
        (
            {"allow_mismatch": ["vllm_versions"]},
            "names 'vllm_versions', which is not compared; did you mean 'vllm_version'",
        ),
        (
            {"allow_mismatch": ["revision", "colour"]},
            "names 'colour', which is not compared; There are: vllm_version, model",
        ),
        ({"digest_timeout_s": 0}, "digest_timeout_s is 0"),
        ({"call_timeout_s": 1e10}, "call_timeout_s is 10000000000.0; it must be at most 1000000 seconds"),
        ({"flight_recorder_files": 0}, "flight_recorder_files is 0; it must be positive"),
        ({"max_in_flight_bytes": 0}, "max_in_flight_bytes is 0; it must be positive"),
        ({"staging_bytes": -1}, "staging_bytes is -1; it must not be negative"),
        ({"num_threads": -1}, "num_threads is -1; it must be from 0 to 256 threads"),
        ({"num_threads": 1 << 20}, r"num_threads is 1.04858e\+06; it must be from 0 to 256 threads"),
        ({"num_threads": 10**400}, "num_threads is a number of 1329 bits; it must be at most 281474976710656"),
        ({"staging_bytes": 10**5000}, "staging_bytes is a number of 16610 bits; it must be at most"),
        ({"lease_slots": -(10**400)}, "lease_slots is a number of 1329 bits"),
        ({"load_timeout_s": 10**400}, r"Number out of range - at `\$.load_timeout_s`"),
        ({"lease_slots": 0}, "lease_slots is 0; it must be from 1 to 16777216, of 16 bytes each"),
        ({"lease_slots": 10**12}, r"lease_slots is 1e\+12; it must be from 1 to 16777216"),
        ({"cost_model": ""}, "cost_model is an empty text; leave it out"),
        ({"flight_recorder_dir": ""}, "flight_recorder_dir is an empty text; leave it out"),
        ({"retry_s": -1}, "retry_s is -1.*must not be negative"),
        ({"allow_mismatch": "model"}, "allow_mismatch"),
        ({"curve_public_keys_dir": "keys"}, "curve_public_keys_dir without curve_secret_key_file"),
    ],
)
def test_a_wrong_value_is_told(extra: dict[str, object], told: str) -> None:
    with pytest.raises(KvReshardError, match=told):
        read_options(extra)


def test_keys_are_read_where_they_are_needed_and_a_missing_file_is_named(tmp_path: Path) -> None:
    public, secret = write_keys(tmp_path, "room")
    options = read_options({"curve_secret_key_file": str(secret), "curve_public_keys_dir": str(tmp_path)})
    assert options.endpoint().keys == options.keys
    assert options.keys is not None
    assert options.keys.trusted == (options.keys.public,)
    assert options.keys.secret.decode() not in repr(options.endpoint())
    public.unlink()
    secret.unlink()
    with pytest.raises(KvReshardError, match=r"there is no key file .*room\.key_secret"):
        _ = options.endpoint()


def test_options_of_the_other_connector_are_taken_for_ours_or_say_what_is_done_anyway() -> None:
    read = read_options({"backends": ["LIBFABRIC"], "kv_lease_duration": 60, "enforce_handshake_compat": True})
    assert (read.backend, read.kv_lease_duration) == ("LIBFABRIC", 60)
    assert read_options({"backends": ["UCX"], "backend": "UCX", "bidirectional_kv_xfer": False}) == Options()
    same = read_options({"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 480, "kv_recompute_threshold": 64})
    assert str(same) == "bidirectional_kv_xfer=True"  # the others are NixlConnector's defaults


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"backends": ["UCX", "GDS"]}, r"backends is \['UCX', 'GDS'\]; ReshardConnector uses one: give its name as backend"),
        ({"backends": "UCX"}, "backends is 'UCX'; ReshardConnector uses one"),
        ({"backends": ["UCX"], "backend": "GDS"}, r"backends is \['UCX'\] and backend is 'GDS'; give one of them"),
        ({"enforce_handshake_compat": False}, "enforce_handshake_compat is False, an option of NixlConnector .*; name what may differ in allow_mismatch"),
        ({"push_registration_timeout": 30}, "push_registration_timeout is 30, .*nothing is pushed; leave it out"),
    ],
)  # fmt: skip
def test_what_the_other_connector_would_do_and_this_one_does_not_is_refused(
    extra: dict[str, object], told: str
) -> None:
    with pytest.raises(KvReshardError, match=told):
        read_options(extra)


def test_the_page_has_a_row_for_each_option() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/options.md").read_text()
    rows = [line.partition(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    assert all(any(f"`{name}`" in row for row in rows) for name in Options.__struct_fields__)
    rows = page.partition("| option of NixlConnector |")[2].partition("\n\n")[0]
    assert all(f"`{name}`" in rows for name in (BACKENDS, *OF_NIXL_CONNECTOR))


def test_what_differs_from_the_defaults_is_told_in_a_line() -> None:
    assert str(Options()) == "all by default"
    told = str(read_options({"digest_share": 0.5, "curve_secret_key_file": "/etc/k.key_secret"}))
    assert told == "curve_secret_key_file='/etc/k.key_secret', digest_share=0.5"


def test_the_longest_load_of_an_engine_or_of_its_children() -> None:
    def config(**extra: object) -> SimpleNamespace:
        return SimpleNamespace(kv_connector_extra_config=extra)

    assert read_load_timeout(config()) == 120.0
    assert read_load_timeout(config(load_timeout_s=7)) == 7.0
    children = [{"kv_connector": "A"}, {"kv_connector_extra_config": {"load_timeout_s": 900}}]
    assert read_load_timeout(config(connectors=children)) == 900.0


def test_the_threads_of_the_other_connector_are_used_as_they_are_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    with caplog.at_level(logging.WARNING):
        assert read_options({"num_threads": 4}).nixl.params["num_threads"] == "4"
    assert not caplog.text
    assert "num_threads" not in read_options({"num_threads": 0}).nixl.params
    assert read_options({}).nixl == NixlOptions()
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert read_options({}).nixl == NixlOptions(num_threads=0)
    assert read_options({"num_threads": 2}).nixl == NixlOptions()


def test_what_copies_cost_depends_on_where_the_caches_are(tmp_path: Path) -> None:
    assert read_options({}).cost() == CostModel()
    assert read_options({}).endpoint("cuda:1").cost == DEVICE_COST
    file, measured = tmp_path / "constants.json", CostModel(copy_s=5.0, min_speedup=MEASURED_SPEEDUP)
    save_constants(file, host_description("cuda:0"), measured)
    options = read_options({"cost_model": str(file)})
    # A host's devices are alike, and what was measured there is believed more than the defaults.
    assert options.cost("cuda:1") == dataclasses.replace(measured, min_speedup=MEASURED_SPEEDUP)
    assert options.cost() == CostModel()
