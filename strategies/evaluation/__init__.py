"""Evaluation and prediction on ranks that have unequal numbers of batches."""
