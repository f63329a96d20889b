"""Pixels to rows of a text model's width, in torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pyspec.gguf import GGUFFile
from pyspec.vision.parts import EncoderBlock, EncoderWeights, Patches, PatchRope
from pyspec.vision.picture import Picture
from pyspec.vision.projector import Projector
from pyspec.vision.towers import TOWERS

PIECE = 256  # patches: some ten milliseconds of a large encoder on eight cores


class Encoder:
    """An encoder whose weights are on a device."""

    def __init__(self, weights: EncoderWeights) -> None:
        self.projector, self.device = weights.projector, weights.device
        self._w, self._tower = weights, TOWERS[weights.projector.type]
        self._blocks = [EncoderBlock(weights, i) for i in range(self.projector.n_block)]
        mean, std = (
            torch.tensor(of, device=self.device) for of in (self.projector.mean, self.projector.std)
        )
        self._mean, self._std = mean, std

    @classmethod
    def load(
        cls,
        file: GGUFFile,
        projector: Projector,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> Encoder:
        """Its weights from the file of `read_projector`. dtype: of matrices; None: f32 on a CPU, else f16 where the file is, or bf16"""
        if dtype is None and device.type == "cpu":
            dtype = torch.float32
        elif dtype is None:
            dtype = torch.float16 if projector.is_half else torch.bfloat16
        return cls(EncoderWeights(file, projector, device, dtype))

    def encode(self, picture: Picture) -> Tensor:
        """[picture.n_row, projector.width] f32 on the device."""
        *_, rows = self.slices(picture, self.projector.n_block or 1)
        assert rows is not None
        return rows

    def slices(self, picture: Picture, n_block: int) -> Iterator[Tensor | None]:
        """Encode in steps: None behind each `n_block` blocks, and on a CPU behind each PIECE patches of one, then the rows
        [picture.n_row, projector.width] f32. Between steps the caller may use the device, or stop."""
        w, p, tower = self._w, self.projector, self._tower
        pixels = torch.tensor(picture.pixels, device=self.device)
        height, width = pixels.shape[:2]
        side = p.merge if tower.is_blocked else 1
        at = Patches.of(height // p.patch, width // p.patch, side, self.device)
        rope = PatchRope.of(tower.rope(at, p.head_dim)) if tower.rope else None
        windows = tower.windows(p, at) if tower.windows else None
        n_piece = PIECE if self.device.type == "cpu" else len(at.y)
        colours = (pixels / 255).sub_(self._mean).div_(self._std)
        x = tower.embed(w, colours.permute(2, 0, 1), at)
        del colours
        deep = []
        for i, block in enumerate(self._blocks):
            x = yield from block(x, rope, None if p.sees_all(i) else windows, n_piece)
            if tower.deep is not None and i in p.deepstack:
                deep.append(tower.deep(w, x, i))
            if (i + 1) % n_block == 0 and i + 1 < len(self._blocks):
                yield None
        rows = torch.cat([part.float() for part in (tower.rows(w, x, at), *deep)], -1)
        assert rows.shape == (picture.n_row, p.width), (rows.shape, picture.n_row, p.width)
        yield rows
