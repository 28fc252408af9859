"""Bytes as people read them."""


def said(count: float) -> str:
    """A number of bytes in MB, or in kB where it is below a tenth of one.

    Example:
        >>> said(12_345_678), said(5_000)
        ('12.3 MB', '5.0 kB')
    """
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
