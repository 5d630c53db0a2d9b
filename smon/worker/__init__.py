"""Windows that are complete → analysis → results; the running diagnosis; imports; housekeeping."""
