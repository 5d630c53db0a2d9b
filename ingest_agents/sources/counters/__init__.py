"""Counters of this host while a job runs: GPUs, network cards, the host itself.

Flow: NVML, ``/sys``, ``/proc`` → `gpu`, `network`, `host` → `source`: which step was it, and whose
GPU → spool. Standard library only; NVML if ``nvidia-ml-py`` is installed.
"""
