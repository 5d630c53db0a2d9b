"""Hangs, from what ranks had called when they were dumped: who has not arrived, and who waits."""
