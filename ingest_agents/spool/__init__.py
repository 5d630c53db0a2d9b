"""The bounded, crash-safe queue on disk between those who record and the agent that sends.

One folder per stream: ``stream.json`` (who writes), ``seg-<first number>`` (frames of
`smon.wire.frames`), and what the agent keeps: ``checkpoint.json``, ``epoch.json``. Rules:
``docs/reference/protocol.md``.
"""
