"""One module per cause: evidence in, drafts of findings or nothing out."""
