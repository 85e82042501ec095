"""Quantities as they are read and printed."""

import pytest

from tmojax.errors import InputError
from tmojax.units import format_bytes, format_seconds, parse_bandwidth, parse_bytes, parse_seconds


def test_quantities_are_read_exactly():
    assert parse_bytes("24 GiB") == 24 * 2**30
    assert parse_bytes("0.1 GB") == 10**8
    assert parse_bandwidth("25e-1 GB/s") == 2.5e9
    assert parse_seconds("5 us") == 5e-6


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_bytes, "1e999999999 GB", "is not a quantity with a unit"),
        (parse_bytes, "1e10 GB", "more than the 1000000000000000000 bytes"),
        (parse_bandwidth, "1e99 GB/s", "more than the 1000000000000000000 bytes per second"),
        (parse_bandwidth, "0.5 B/s", "less than one byte per second"),
        (parse_seconds, "1e7 s", "more than the 1000000 seconds"),
    ],
)
def test_quantities_out_of_range_are_errors(parse, text, message):
    with pytest.raises(InputError, match=message):
        parse(text, "field")


def test_what_rounds_up_to_a_unit_is_printed_in_it():
    assert [format_bytes(size) for size in (999, 999_400, 999_600, 1e12)] == ["999 B", "999 kB", "1 MB", "1 TB"]
    assert [format_seconds(s) for s in (1 - 1e-10, 1e-3 - 1e-13, 0.9999, 0.0)] == ["1 s", "1 ms", "999.9 ms", "0 s"]
