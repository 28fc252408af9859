"""Bytes as people read them."""


def format_bytes(count: float) -> str:
    """A number of bytes in MB, or in kB below 0.1 MB.

    Example:
        >>> format_bytes(12_345_678), format_bytes(5_000)
        ('12.3 MB', '5.0 kB')
    """
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
