"""Do notes survive the road, and does noise survive nobody?"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreshard.session.notes import VERSION, Heartbeat, Note, Report, heartbeats, read_note, write_note
from kvreshard.transport.base import MAX_NOTIFICATION_BYTES

NOTES: list[Note] = [
    Report(VERSION, "d/1", "r", 2**64 - 1, 3, (0, 3), False),
    Heartbeat(VERSION, "d", (("r", 1), ("s", 2))),
]


@pytest.mark.parametrize("note", NOTES)
def test_a_note_is_read_as_it_was_written(note: Note) -> None:
    assert read_note(write_note(note)) == note


@pytest.mark.parametrize("note", NOTES)
def test_every_truncation_and_trailing_byte_is_nothing(note: Note) -> None:
    message = write_note(note)
    assert [read_note(message[:length]) for length in range(len(message))] == [None] * len(message)
    assert read_note(message + b"\x00") is None


@given(noise=st.binary(max_size=200))
def test_noise_is_nothing(noise: bytes) -> None:
    assert read_note(noise) is None


@pytest.mark.parametrize(
    "value",
    [
        ["report", VERSION + 1, "d", "r", 1, 0, [0], True],
        ["report", VERSION, "d", "r", -1.5, 0, [0], True],
        ["report", VERSION, "d", "r", "1", 0, [0], True],
        ["unknown", VERSION],
        {"version": VERSION},
        None,
    ],
)
def test_what_is_almost_a_note_is_nothing(value: object) -> None:
    assert read_note(msgspec.msgpack.encode(value)) is None


@pytest.mark.parametrize("name", ["x" * 200, "€" * 240, "r"])
def test_heartbeats_fit_the_transport_however_many_leases_there_are(name: str) -> None:
    leases = [(name + str(i), 2**64 - 1) for i in range(10_000)]
    notes = list(heartbeats("e" * 100, leases))
    assert [lease for note in notes for lease in note.leases] == leases
    assert max(len(write_note(note)) for note in notes) < MAX_NOTIFICATION_BYTES
    assert list(heartbeats("e", [])) == []
