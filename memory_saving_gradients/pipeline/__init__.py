"""From a differentiated graph to one that saves memory: decide, rewrite, prove, explain.

Imports `options`, `rewriting`, `proving` and what lies below them.
"""
