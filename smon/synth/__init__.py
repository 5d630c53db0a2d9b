"""Synthetic jobs with a known answer: scenario → schedule → plan → times → op table.

A little model of a training step of its own, made to test the analysis: nothing here imports
`smon.graph`, `smon.simulate` or `smon.attribute`.
"""
