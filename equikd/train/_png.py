"""PNG: pixels as bytes that every viewer reads, without an imaging library.

A PNG is a signature and chunks, each with its length, kind and checksum: the header, the pixels (each line behind a
byte for its filter, 0 for none; deflated), the end. See the PNG specification, third edition (W3C, 2025).
"""

import struct
import zlib

import numpy as np

_COLOUR = {1: 0, 3: 2, 4: 6}  # channels -> colour type: grey, RGB, RGBA


def png(pixels: np.ndarray) -> bytes:
    r"""An image file.

    Args:
        pixels: uint8 `h w c`, of 1, 3 or 4 channels.

    Example:
        >>> png(np.zeros((2, 3, 1), np.uint8))[:8]
        b'\x89PNG\r\n\x1a\n'
    """
    height, width, channels = pixels.shape
    lines = np.zeros((height, 1 + width * channels), np.uint8)
    lines[:, 1:] = pixels.reshape(height, width * channels)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
