"""What a user may ask for, checked.

Imports `plans` and what lies below it.
"""
