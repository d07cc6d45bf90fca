"""Compares all compression methods on one model and one prompt set: acceptance, bytes that a draft step reads, and speed."""
