"""Reading traces: files → one op table (`smon.trace.table`) → lanes (`smon.trace.grid`)."""
