"""Plans as users see them, and the registry of those that were applied.

Imports `report` and what lies below it.
"""
