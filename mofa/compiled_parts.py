"""Parts of mofa in C, each beside the Python that is its reference and stands in where it is not compiled.

``hatch_build.py`` compiles them: as a wheel or an editable installation is made, or in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

Signature = tuple[type | None, Sequence[type] | None]
"""What a function gives and takes; None for what is not looked at."""


def source_hash(source: Path) -> str:
    """What tells a library of other source text from one of this."""
    return sha256(source.read_bytes()).hexdigest()


def load_compiled_part(source: Path, library: Path, signatures: Mapping[str, Signature]) -> ctypes.PyDLL | None:
    """A compiled part with its functions declared; None where there is none of this source, for this machine.

    Parameters
    ----------
    source, library
        Its C file, and what was compiled from that.
    signatures
        Of its functions by name; one of them is ``source``, the hash of the text that was compiled.
    """
    try:
        compiled = ctypes.PyDLL(str(library))
        for name, (result, arguments) in signatures.items():
            function = getattr(compiled, name)
            function.restype, function.argtypes = result, arguments
        same = compiled.source() == source_hash(source).encode()
    except (OSError, AttributeError):
        return None
    return compiled if same else None
