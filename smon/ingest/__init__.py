"""Taking batches in: decode and check → write-ahead log → acknowledge → event files and rows."""
