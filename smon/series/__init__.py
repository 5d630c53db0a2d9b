"""Step times of a whole job: bursts and changes of level; no rank is ever named."""
