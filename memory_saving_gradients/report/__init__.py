"""A plan as text, pictures and data.

Imports `console` and `planning`.
"""
