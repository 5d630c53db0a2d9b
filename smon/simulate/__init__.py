"""Simulation of a window: recorded times → durations → what-if step times.

Sections 3 and 4 of ``docs/method.md``.
"""
