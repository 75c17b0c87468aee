"""The formulas of docs/wire.md in plain Python, from nothing but the JSON: no code of the package."""

from typing import Any


def page_and_byte(axis_map: dict[str, Any], coordinate: int) -> tuple[int, int]:
    """The page's formula in plain Python, from the JSON."""
    owned = axis_map["owned"]
    if "step" in owned:
        assert owned["start"] <= coordinate % owned["step"] < owned["start"] + owned["run"]
        index = coordinate // owned["step"] * owned["run"] + coordinate % owned["step"] - owned["start"]
    else:
        assert owned["start"] <= coordinate < owned.get("stop", 1 << 62)
        index = coordinate - owned["start"]
    page = byte = 0
    for digit in axis_map["digits"]:
        value = index if digit["extent"] is None else index % digit["extent"]
        index = 0 if digit["extent"] is None else index // digit["extent"]
        page, byte = page + value * digit["page_step"], byte + value * digit["byte_step"]
    return page, byte


def cell_address(
    layout: dict[str, Any], rank: int, field: str, coordinates: dict[str, int], pages: list[int], first_page: int = 0
) -> int | None:
    """The page's formula for a whole cell; None if the rank does not have it."""
    held = next(r for r in layout["ranks"] if r["rank"] == rank)
    shard = next((s for s in held["shards"] if s["field"] == field), None)
    if shard is None:
        return None
    geometry = layout["geometries"][shard["geometry"]]
    places = []
    for axis_map in geometry["axes"]:
        try:
            places.append(page_and_byte(axis_map, coordinates[axis_map["axis"]]))
        except AssertionError:
            return None
    page, byte = (sum(column) for column in zip(*places, strict=True))
    region = next(r for r in held["regions"] if r["name"] == shard["region"])
    page_id = pages[page - first_page]
    return int(region["address"] + shard["offset_bytes"] + page_id * geometry["page_stride_bytes"] + byte)
