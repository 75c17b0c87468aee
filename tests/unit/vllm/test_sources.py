"""Hosts that are not listed are refused in every spelling, and a wrong list at start."""

from __future__ import annotations

import pytest

from kvreshard.model import KvReshardError
from kvreshard.vllm.options import read_options
from kvreshard.vllm.sources import SourceHosts

LISTED = SourceHosts(["10.0.0.0/8", "192.168.7.9", "fd00::/8", "Prefill-0.Example", "*.pods.example", "localhost"])


@pytest.mark.parametrize(
    "host",
    [
        "10.0.0.1", "10.255.255.255", "192.168.7.9", "fd00::1", "fd12:3456::9%eth0", "::ffff:10.0.0.1", "prefill-0.example",
        "PREFILL-0.EXAMPLE.", "a.pods.example", "a.b.pods.example", "localhost",
    ],
)  # fmt: skip
def test_what_is_listed_is_allowed(host: str) -> None:
    assert LISTED.allows(host)


@pytest.mark.parametrize(
    "host",
    [
        "11.0.0.1", "192.168.7.8", "127.0.0.1", "::1", "fe80::1%eth0", "::ffff:11.0.0.1", "2001:db8::1", "prefill-1.example", "pods.example",
        "evilpods.example", "prefill-0.example.evil.example", "10.0.0.1.evil.example", "", ".", "*", "*.pods.example.evil",
        "10.1", "0xa000001", "167772161", "010.0.0.1", "10.0.0.1%eth0x" * 20, "::ffff:0:10.0.0.1", "64:ff9b::10.0.0.1",
    ],
)  # fmt: skip
def test_what_is_not_listed_is_refused_however_it_is_written(host: str) -> None:
    assert not LISTED.allows(host)


def test_without_a_list_every_host_is_allowed() -> None:
    assert SourceHosts().allows_all
    assert SourceHosts().allows("anywhere.example")
    assert not LISTED.allows_all


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "10.0.0.0/33",
        "10.0.0.1/8",
        "10.0.0",
        "a b",
        "http://a",
        "a:5600",
        "*",
        "*.",
        "a..b",
        "-a",
        "[::1]",
        "a/8",
        "a\nb",
    ],
)
def test_an_entry_that_is_none_is_refused_with_an_example(entry: str) -> None:
    with pytest.raises(
        KvReshardError, match=r"source_hosts: '.*is no network, address or name.*10\.0\.0\.0/8"
    ) as caught:
        read_options({"source_hosts": [entry]})
    assert str(caught.value).isprintable()
    with pytest.raises(KvReshardError, match="source_hosts"):
        read_options({"source_hosts": "10.0.0.0/8"})


def test_the_option_is_read() -> None:
    assert read_options({"source_hosts": ["10.0.0.0/8"]}).source_hosts == ("10.0.0.0/8",)
    assert read_options({}).source_hosts == ()
