"""What an engine's log says when it starts: one line with all that a report of a fault needs, and what its options leave open."""

from __future__ import annotations

import logging
import os
from typing import Any

from kvreshard.model import EngineLayout
from kvreshard.model.logs import fields, get_logger
from kvreshard.model.text import counted
from kvreshard.session.handshake_messages import Address
from kvreshard.vllm.metrics import read_build_info
from kvreshard.vllm.options import Options

logger = get_logger(__name__)


def log_start(vllm_config: Any, options: Options, layout: EngineLayout, address: Address | None) -> None:
    """The line. `address`: where the engine listens; None if it only loads."""
    info, config = read_build_info(vllm_config), vllm_config.kv_transfer_config
    tls = os.environ.get("UCX_TLS", "") if info["backend"] == "UCX" else ""
    guarded = "to engines with a trusted key" if options.curve_secret_key_file else "without keys"
    logger.info(
        "kvreshard %s with vLLM %s and NIXL %s (%s): engine %s, kv_connector %s, kv_role %s; %s, %d fields in %s, %d MiB of cache; %s; options: %s",
        *(info["version"], info["vllm"], info["nixl"], f"UCX_TLS={tls}" if tls else info["backend"]),
        *(layout.engine, config.kv_connector, config.kv_role),
        *(counted(len(layout.ranks), "rank"), len(layout.fields), counted(len(layout.groups), "group")),
        sum(sum(rank.template.region_bytes) for rank in layout.ranks) >> 20,
        f"hands out its layout at {address.host_port} {guarded}" if address else "hands out nothing: it only loads",
        options,
        extra=fields("started", engine=layout.engine, address=address.host_port if address else None, **info),
    )


def log_open_sources(options: Options) -> None:
    """Log that requests may name any host as their source, where no list of hosts is given."""
    if not options.source_hosts:
        is_guarded = options.curve_secret_key_file is not None
        logger.log(
            logging.INFO if is_guarded else logging.WARNING,
            "requests may name any host as their source, and the ranks contact it%s; list the hosts of the prefill engines in "
            "source_hosts, or let only the router send kv_transfer_params (SECURITY.md)",
            ", though only an engine with a trusted key is read from" if is_guarded else "",
            extra=fields("sources_open"),
        )


def warn_of_policy(source: str) -> None:
    """What `kv_load_failure_policy` fail means on an engine that reads answers, or prefills that are under way (`source`)."""
    logger.warning(
        "with kv_load_failure_policy fail a request ends with an error when %s is given up while it is read; set the policy to recompute on "
        "this engine",
        source,
        extra=fields("failure_policy"),
    )
