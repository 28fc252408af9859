"""A plan for people: as a table, as pictures, as data."""
