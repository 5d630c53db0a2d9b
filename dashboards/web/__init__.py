"""The pages of the on-call dashboard; mounted by `smon.api`."""
