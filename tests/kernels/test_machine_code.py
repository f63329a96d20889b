"""Sums whose halves come from one register are found in machine code, and others are not."""

from __future__ import annotations

from machine_code import broken_sums

RIGHT = """
        /*1cb0*/                   UIADD3 UR17, UP0, UR6, 0x2, URZ ;
        /*1e90*/                   UMOV UR4, URZ ;
        /*1eb0*/                   UIADD3.X UR4, UR4, 0x40000040, URZ, UP0, !UPT ;
        /*8c40*/                   UIADD3 UR9, UP0, UR4, 0x80, URZ ;
        /*8c60*/                   UMOV UR4, URZ ;
        /*8c70*/                   UIADD3.X UR5, UR4, 0x40000040, URZ, UP0, !UPT ;
        /*8cc0*/                   UIADD3.64 UR20, UR4, 0x80, URZ ;
        /*8cd0*/                   UIADD3 UR4, UP0, UR4, 0x4, URZ ;
        /*8ce0*/                   UIADD3.X UR5, URZ, UR5, URZ, UP0, !UPT ;
        /*3a80*/                   UIADD3 UR18, UP1, UR5, 0x40, URZ ;
        /*3ae0*/                   UIADD3.X UR19, UR7, URZ, URZ, UP1, !UPT ;
"""
WRONG = """
        /*2f60*/                   UIADD3 UR5, UP0, UR8, 0x20, URZ ;
        /*2f70*/                   IMAD.X R85, RZ, RZ, R73, P2 ;
        /*2f80*/                   UIADD3.X UR7, UR8, -0x3ffffff0, URZ, UP0, !UPT ;
        /*2cf0*/                   UIADD3 UR4, UP0, UR6, 0x40, URZ ;
        /*2d30*/                   UIADD3.X UR6, UR6, -0x7fffffe0, URZ, UP0, !UPT ;
"""


def test_halves_of_two_registers_are_right() -> None:
    assert broken_sums(RIGHT) == []


def test_halves_of_one_register_are_found() -> None:
    assert [line.split()[1] for line in broken_sums(RIGHT + WRONG + RIGHT)] == ["UR7,", "UR6,"]
