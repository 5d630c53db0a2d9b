"""warmup: the first steps of the job took longer; they are left out of everything else."""

from __future__ import annotations

from smon.attribute.persistence import Kind, Persistence
from smon.diagnose.draft import Draft
from smon.diagnose.evidence import Evidence


def find(evidence: Evidence) -> list[Draft]:
    """The steps that were left out as warm-up, with what they cost over the whole window."""
    if not evidence.warmup:
        return []
    steps = len(evidence.steps) + len(evidence.warmup)
    extra = sum(ns for _, ns in evidence.warmup)
    first = evidence.warmup[0][0]
    last = evidence.warmup[-1][0]
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    return [
        Draft(
            verdict="warmup",
            cause="warmup",
            scope="job",
            phase="whole step",
            persistence=Persistence(Kind.ONE_OFF, len(evidence.warmup) / steps, first),
            confidence=0.9,
            evidence=(
                f"{which} took {extra / len(evidence.warmup) / 1e6:.0f} ms longer "
                "than the rest, and left out of all other numbers",
            ),
            next=("nothing, unless it comes back after each restart",),
            extra_excess_ns=extra / steps,
            between_steps=True,
            min_share=0.0,
        )
    ]
