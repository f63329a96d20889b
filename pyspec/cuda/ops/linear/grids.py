"""Values of the codes of IQ2_XXS and IQ3_XXS: points of a lattice, and signs of eight weights in seven bits.

The format fixes which 256 points are used, a list without a shorter rule. They lie here as numbers of one field a weight, the
first weight's lowest, one number after the other with the highest bits first, in base 85.
"""

from __future__ import annotations

import base64

import torch
from torch import Tensor

from pyspec.cuda.context import per_device

IQ2_LEVELS = (8, 25, 43)
_IQ2_POINTS = (
    b"0000200jUD015yR02BZq03rY=04e}M07L*#09XKF0Av7w0D=ID0HOf_0R#aM0Tls20fYgV0ssO60wMx}1OWsD1P}xv1SAAN1VRKz1YiV#1cU^T1f"
    b"&H31p);K1t0}R1!)C<1(5~`1`q~7280Hr2mlBL2nYxi2q*|a2t)`_2vP`$2?Pm13IYlg5CISb5D*X{5I_)M5QGqr5S0-C5eN|=5l|6Y5r7gT5=9g"
    b"M6bKX`6eSc%6o3^N6=D_u78V!*7z7v)7(f_-82}jt8K4?bAOIi&APOKvAYmYYAc7$&AxI(sA_61<Bm^W7BtRrqB>*KsC1fU$C<rJZD3mHhKmkAmK"
    b"oCF}Kp{XRKtMo9KvqCtK!HGnK#)NIK_Ee4L4ZMpLIFY$LP$bZLTE$)L<mG6M1Vw@MG{3MMgT|wNCZd_NI*zMNdQS$NnuHXN<~VLPykQ}P!UiWP#{"
    b"o%P>4|kQ9@CqQjt`URFYK+RsmL2SO8cNSQ%JkSwLC{U<6<gU_fAKVE|!OVi;mzWB_CZWe{Z&WrS!#fB=93fC_*?fP#Spff#{6f)RuPgam{TgcXE9"
    b"gkXgLg+_&xh6#p1hG2*Si3ExfkOYtrkR*^mkfD(lk${p#lmL_>lth(Ln1PufpaP&!poO6cq5z~As8Fc{"
)
IQ3_LEVELS = (4, 12, 20, 28, 36, 44, 52, 62)
_IQ3_POINTS = (
    b"00062KnVb_4*>uY0gxgCussA2Lj-_I1rSvQfLaC+YzKgV2q1(AkdO%=nF+9;3Xrc0(7_CF$PA#>4}l92@gx%QI}_1C6meP>p`9B+$Q;4W9x?GC5("
    b"6ND3Lz2`A%Yqq!Y3kvKqMkbB?3|?5`!p$iYXG9E26+GBG4_8<}YIbFjFWs15`F+c{o$jJ_G<jBnd#Y5J4msL6jmy6hlN*NJOMjMTB!lba+Svf=HB"
    b")Nd%Hf^q@-A!AykAPlWtY)hkprS5_5#TouDy<>g=&2w<iWVKyjZRyt$`LS+V7W=3Xc7K3Ppm1?HCY?j+`hbMEVKy+tPcGrw~=d*pc@PJ4Uf!H5{x"
    b"G#sukcs%9iwL%ic;%2uDU(T6mN|HwS;(BJ*r2K*ql!SJYF4J&jH#-+tSalUixaVXI<zZUx{K7lEEK{_Cc{io#~hE#OxVrsB-CAM*}cQv9s}TB2jG"
    b"qx;;vTa4vOkts_YKU?Y{8wA0hM)LiJCW"
)


def _levels(packed: bytes, n_level: int, columns: int) -> list[list[int]]:
    width = (n_level - 1).bit_length()
    whole = int.from_bytes(base64.b85decode(packed), "big")
    rows = [whole >> width * columns * (255 - row) for row in range(256)]
    return [[row >> width * k & (1 << width) - 1 for k in range(columns)] for row in rows]


@per_device
def iq2_levels(device: torch.device) -> Tensor:
    """[256, 8] uint8: numbers of IQ2_LEVELS."""
    return torch.tensor(_levels(_IQ2_POINTS, len(IQ2_LEVELS), 8), dtype=torch.uint8, device=device)


@per_device
def iq3_levels(device: torch.device) -> Tensor:
    """[256, 4] uint8: numbers of IQ3_LEVELS."""
    return torch.tensor(_levels(_IQ3_POINTS, len(IQ3_LEVELS), 4), dtype=torch.uint8, device=device)


@per_device
def signs(device: torch.device, minus: int) -> Tensor:
    """[128, 8] uint8, zero or `minus`: a set bit is a minus, and the eighth makes their number even."""
    bits = [code | code.bit_count() % 2 << 7 for code in range(128)]
    return torch.tensor(
        [[minus * (b >> k & 1) for k in range(8)] for b in bits], dtype=torch.uint8, device=device
    )
