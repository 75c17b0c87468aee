"""From two layouts to addresses: compile once per pair, bind once per request. Pure; no I/O and no model vocabulary."""

from kvreshard.plan.bind import bind
from kvreshard.plan.byte_ranges import ByteRanges
from kvreshard.plan.compile import compile_route, compile_routes
from kvreshard.plan.copies import Copies, CopyList, Page, PagedCopies
from kvreshard.plan.election import Election, elect
from kvreshard.plan.fill import find_holes, find_unwritten
from kvreshard.plan.match import match_fields
from kvreshard.plan.reads import ReadPlan, plan_reads
from kvreshard.plan.route import Route
from kvreshard.plan.transfer import RankTransfer

__all__ = [
    "ByteRanges",
    "Copies",
    "CopyList",
    "Election",
    "Page",
    "PagedCopies",
    "RankTransfer",
    "ReadPlan",
    "Route",
    "bind",
    "compile_route",
    "compile_routes",
    "elect",
    "find_holes",
    "find_unwritten",
    "match_fields",
    "plan_reads",
]
