"""Writes a GGUF anew with all weights as F32, by the `gguf` package: python tools/real_f32.py MODEL.gguf OUT.gguf

tools/record_real.py needs such a file: products with F32 weights are those in which llama.cpp rounds no input.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize

ALL_F32 = 0
"""`general.file_type` of such a file."""


def write_f32(model: Path, out: Path) -> None:
    reader = GGUFReader(model)
    writer = GGUFWriter(out, str(reader.fields["general.architecture"].contents()))
    for name, value in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, inner = value.types[0], value.types[-1] if value.types[0] == GGUFValueType.ARRAY else None
        content = ALL_F32 if name == "general.file_type" else value.contents()
        writer.add_key_value(name, content, kind, sub_type=inner)
    for tensor in reader.tensors:
        writer.add_tensor(
            tensor.name, np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    write_f32(arguments.model, arguments.out)


if __name__ == "__main__":
    main()
