"""Memory of a CPU that is used over and over stays with the process.

A step frees and takes the same large blocks again. glibc hands blocks of more than 32 MiB, and the free end of its
heap, back to the kernel, which fills them with zeros page by page when they are wanted again.
"""

from __future__ import annotations

import ctypes
import platform

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
_MOST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to keep what is freed, until this process ends; False where there is another malloc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP, 2**30)) and bool(mallopt(_TRIM, _MOST))
