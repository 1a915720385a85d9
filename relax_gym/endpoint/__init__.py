"""Evaluation of any model behind an OpenAI-compatible endpoint."""
