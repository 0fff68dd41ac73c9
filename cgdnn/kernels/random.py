"""Counter-based random numbers: the bits depend on (key, counter, index) and on nothing else.

The key comes from the seed and the layer's name, the counter numbers the forward passes, the
index numbers the samples or elements. Any thread can so draw any number in any order, and a
resumed run draws the same ones. The mixing function is the finalizer of SplitMix64 (Steele, Lea,
Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014), applied once for each word.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from cgdnn.kernels._jit import device

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)


def key_of(seed: int, name: str) -> int:
    """Return the key of the stream `name` under `seed`: a signed 64-bit integer."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@device
def mix(word):  # type: ignore[no-untyped-def]
    """Mix one uint64 (scalar in a kernel, array in NumPy) into another."""
    word = (word ^ (word >> _S30)) * _MIX_1
    word = (word ^ (word >> _S27)) * _MIX_2
    return word ^ (word >> _S31)


@device
def random_u32(key, counter, index):  # type: ignore[no-untyped-def]
    """Return 32 random bits as uint64 for int64 `key`, `counter` and `index` (in kernels)."""
    word = mix(np.uint64(key) + _GOLDEN * np.uint64(counter + 1))
    return mix(word + _GOLDEN * np.uint64(index + 1)) >> _S32


def uniform_u32(
    key: int, counter: int, index: npt.NDArray[np.int64] | int
) -> npt.NDArray[np.uint64]:
    """Return 32 random bits for each index: the same bits as `random_u32`, for arrays.

    Parameters
    ----------
    key, counter : int
        Signed 64-bit.
    index : array of int64, or int

    Returns
    -------
    array of uint64
        Of the shape of ``np.atleast_1d(index)``, values below 2**32.
    """
    with np.errstate(over="ignore"):
        start = np.array([key], np.int64).view(np.uint64)
        word = mix(start + _GOLDEN * np.array([counter + 1], np.int64).view(np.uint64))
        steps = (np.atleast_1d(np.asarray(index, np.int64)) + 1).view(np.uint64)
        drawn: npt.NDArray[np.uint64] = mix(word + _GOLDEN * steps) >> _S32
    return drawn
